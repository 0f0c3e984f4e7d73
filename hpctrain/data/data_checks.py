"""Checks that token files fit a deck: their kind, their vocabulary and their number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpctrain.data.file_contents import CHAT, PREFERENCES, PROMPTS, TEXT_KIND
from hpctrain.data.packing import Packing
from hpctrain.data.token_files import Tokens, title_of
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.mixture import dataset_entries, tokens_key
from hpctrain.deck.sections.objective import POLICY_KINDS, PREFERENCE_KINDS
from hpctrain.text import counted


def split_sizes(tokens: int, sequence: int, fraction: float) -> tuple[int, int]:
    """Return the numbers of training and held-out sequences of a text of so many tokens.

    The number of training sequences is 0 if there are too few tokens.
    """
    return split_samples(max(0, (tokens - 1) // sequence), fraction)


def split_samples(count: int, fraction: float) -> tuple[int, int]:
    """Return the numbers of training and held-out samples of `count` samples.

    The number of training samples is 0 if there are too few. At least one sample is held out if `fraction` is
    above zero.
    """
    held_out = max(1, int(fraction * count)) if fraction else 0
    return max(0, count - held_out), held_out


def needed_tokens(sequence: int, fraction: float) -> int:
    """Return the smallest number of tokens that gives both splits a sequence."""
    return (2 if fraction else 1) * sequence + 1


def masks_documents(deck: Deck, tokens: Sequence[Tokens]) -> bool:
    """Return True if attention does not cross documents, as in every mixture with conversations."""
    return deck.data.document_mask or any(each.kind == CHAT for each in tokens)


def token_problems(deck: Deck, tokens: Sequence[Tokens]) -> Iterator[DeckProblem]:
    """Yield the problems of the deck with the tokens of its entries."""
    mask = masks_documents(deck, tokens)
    for entry, each in zip(dataset_entries(deck), tokens, strict=True):
        yield from _problems(deck, each, title_of(entry.tokens), mask)


def kind_problem(deck: Deck, file: Tokens) -> str:
    """Return why the deck's objective cannot learn from the kind of data in a file; "" if it can."""
    kind = deck.objective.kind
    learned_from = {
        **dict.fromkeys(PREFERENCE_KINDS, PREFERENCES),
        **dict.fromkeys(POLICY_KINDS, PROMPTS),
        "sft": CHAT,
    }
    if (needed := learned_from.get(kind)) is not None:
        if file.kind == needed:
            return ""
        requires = f'objective.kind = "{kind}" requires {needed}'
        return f"holds {file.kind}, but {requires} (create it with `hpctrain prepare --{needed}`)"
    if file.kind in {TEXT_KIND, CHAT}:
        return ""
    remedy = ' (or set objective.kind = "dpo" or "reward")' * (file.kind == PREFERENCES)
    return f'holds {file.kind}, but objective.kind = "{kind}" requires text or conversations{remedy}'


def sequence_count(file: Tokens, sequence: int, pack: bool) -> int:
    """Return the number of sequences of a file, including held-out ones."""
    if file.kind == CHAT:
        return Packing.of(file, sequence, pack).rows
    return max(0, (file.tokens - 1) // sequence)


def trained_count(file: Tokens, sequence: int, fraction: float, pack: bool) -> int:
    """Return the number of training sequences of a file.

    Pairs are counted even if they are later left out because their answers are too long.
    """
    if file.kind == PREFERENCES:
        return 2 * split_samples(file.documents // 2, fraction)[0]
    return split_samples(sequence_count(file, sequence, pack), fraction)[0]


def _conversation_problems(deck: Deck, file: Tokens, title: str) -> Iterator[DeckProblem]:
    fraction, length = deck.data.validation, deck.batch.sequence
    if deck.model.module is not None:
        sentence = f"{title} holds conversations, which model.module does not support"
        yield DeckProblem(
            tokens_key(deck), f"{sentence}, since its attention does not separate them", ("model.module",)
        )
        return
    packing = Packing.of(file, length, deck.data.pack)
    if split_samples(packing.rows, fraction)[0]:
        return
    if packing.left_out and not packing.rows:
        begin = f"in the {counted(packing.left_out, 'conversation')} of {title}, no answer begins within it"
        sentence = f"is too short: {begin}, so there is nothing to learn (increase it)"
        yield DeckProblem("batch.sequence", sentence, ("data.tokens",))
        return
    has = f"{title} has {counted(packing.rows, 'sequence')} of conversations"
    more = ", one of them held out" if packing.rows else " with tokens to predict"
    yield DeckProblem(tokens_key(deck), f"{has}{more}, so none is left to train on", ("data.validation",))


def _problems(deck: Deck, file: Tokens, title: str, mask: bool) -> Iterator[DeckProblem]:
    vocabulary, sequence, fraction = deck.model.vocabulary, deck.batch.sequence, deck.data.validation
    if vocabulary is not None and file.vocabulary > vocabulary:
        would = "which adds tokens" if deck.model.source is not None else "or leave the key out"
        smaller = f"is smaller than the vocabulary of {title}, {file.vocabulary}"
        resumed = "a resumed run keeps its vocabulary and requires a token file of its tokenizer"
        yield DeckProblem("model.vocabulary", f"{smaller}: give at least that, {would} ({resumed})")
    if problem := kind_problem(deck, file):
        yield DeckProblem(tokens_key(deck), f"{title} {problem}", ("objective.kind",))
        return
    if file.kind in {PREFERENCES, PROMPTS}:
        return
    if file.kind == CHAT:
        yield from _conversation_problems(deck, file, title)
        return
    if not split_sizes(file.tokens, sequence, fraction)[0]:
        held_out = f" with data.validation = {fraction:g}" if fraction else ""
        longest = (file.tokens - 1) // (2 if fraction else 1)
        remedy = f"use at most {longest}" if longest > 0 else "use a file with more tokens"
        needed = f"since it requires {needed_tokens(sequence, fraction)}{held_out}"
        sentence = f"is too long for the {file.tokens} tokens of {title}, {needed} ({remedy})"
        yield DeckProblem("batch.sequence", sentence, ("data.validation",))
    if mask and int(file.read(file.tokens - 1, 1)[0]) != file.end_of_document:
        missing = f"but {title} does not end with token {file.end_of_document}, which ends a document"
        sentence = f"requires documents with an end, {missing} (leave it out, or prepare the text again)"
        yield DeckProblem("data.document_mask", sentence, ("data.tokens",))
