"""What a run is evaluated on: the share that it holds out of what it is trained on, and sets of their own."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hpctrain.comm.world import World
from hpctrain.data.batches import MASKED, Batches
from hpctrain.data.contents import TEXT_KIND
from hpctrain.data.fit import unfit_kind
from hpctrain.data.mixture import sequences_of
from hpctrain.data.text_bytes import token_bytes
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.data.tokenizer_difference import tokenizer_difference
from hpctrain.data.tokens import TokenFile
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.rows import row_message
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.evaluation import VALIDATION, EvaluationSet
from hpctrain.deck.sections.objective import LANGUAGE_KINDS
from hpctrain.engine.corpus import Corpus, require_alike
from hpctrain.errors import HpctrainError
from hpctrain.text import counted

_SETS = "evaluation.sets"


@dataclass(frozen=True)
class HeldOut:
    """The first `sequences` of these batches. In `tokens` that are to be predicted there are so many bytes of
    text, None where nobody knows; `in_nats` says whether the loss is that of the next token.
    """

    name: str
    batches: Batches
    sequences: int
    tokens: int = 0
    text_bytes: int | None = None
    in_nats: bool = False

    def figures(self, loss: float, **others: float) -> dict[str, float]:
        """What is told of a mean loss: itself, and where it is one of text, its exponential, the perplexity,
        and bits per byte; of another, what its objective has beside it.
        """
        found = {"loss": loss, **others}
        if self.in_nats:
            found["perplexity"] = math.inf if loss >= _LARGEST else math.exp(loss)
            if self.text_bytes:
                found["bits_per_byte"] = loss * self.tokens / (math.log(2) * self.text_bytes)
        return found


_LARGEST = 709.0  # of what exp is a finite number


def open_held_out(deck: Deck, world: World, corpus: Corpus) -> tuple[HeldOut, ...]:
    """All that a deck is evaluated on, the held-out share first. Collective.

    HpctrainError on all ranks where a set's file is too short, or of another tokenizer.
    """
    found: list[HeldOut] = []
    if corpus.validation is not None:
        found.append(HeldOut(VALIDATION, corpus.validation, deck.run.evaluate_sequences))
    files: list[TokenFile] = []
    with world.agreement():
        problems: list[str] = []
        for number, each in enumerate(deck.evaluation.sets):
            file = open_set(each)
            wrong = list(unfit(deck, file, "" if corpus.file is None else corpus.file.tokenizer_text))
            problems += [row_message(deck, _SETS, number, "tokens", sentence) for sentence in wrong]
            if not wrong:
                sequences = each.sequences or deck.run.evaluate_sequences
                found.append(HeldOut(each.name, batches_of(deck, file), sequences))
                files.append(file)
        if problems:
            raise HpctrainError(problems)
    require_alike(world, files)
    if corpus.file is None:
        return tuple(found)
    return tuple(counted_out(deck, world, each, corpus.file.tokenizer) for each in found)


def open_set(given: EvaluationSet) -> TokenFile:
    """The file of a set; InputOutputError as of TokenFile."""
    return TokenFile(given.tokens, f"evaluation.tokens of {given.name}")


def set_problems(deck: Deck, tokenizer: str | None) -> Iterator[DeckProblem]:
    """Everything in the files of sets that a run would refuse; a file that is missing may still be made, and
    so may the one that has the tokenizer, then None.
    """
    for number, each in enumerate(deck.evaluation.sets):
        if not os.path.lexists(each.tokens):
            continue
        try:
            wrong = list(unfit(deck, open_set(each), tokenizer))
        except HpctrainError as error:
            begin = f"evaluation.tokens of {each.name} = {each.tokens}: "
            wrong = [problem.removeprefix(begin) for problem in error.problems]
        yield from (DeckProblem(_SETS, sentence, row=(number, "tokens")) for sentence in wrong)


def unfit(deck: Deck, file: TokenFile, tokenizer: str | None) -> Iterator[str]:
    """What keeps a model with this tokenizer (its text), if it is known, from being evaluated on a file, in
    words.
    """
    sequence = deck.batch.sequence
    if unfit := unfit_kind(deck, file):
        yield unfit
    elif file.kind == TEXT_KIND and file.tokens <= sequence:
        yield (
            f"has {counted(file.tokens, 'token')}, but requires at least {sequence + 1}, one more than "
            f"batch.sequence = {sequence} (use a larger file)"
        )
    if tokenizer is None:
        return
    difference = tokenizer_difference(file.tokenizer_text, tokenizer, file.where, "the model's tokenizer")
    if difference:
        yield (
            f"its tokenizer differs from that of the training data: {difference} (prepare it with "
            "`hpctrain prepare --tokenizer`)"
        )


def batches_of(deck: Deck, file: TokenFile) -> Batches:
    """All sequences of a file."""
    mask, pack = deck.data.document_mask, deck.data.pack
    margins = deck.objective.kind == "reward"
    source = sequences_of(file, deck.batch.sequence, 0.0, "train", mask, pack, margins)
    return Batches(source, deck.run.seed)


def counted_out(deck: Deck, world: World, held_out: HeldOut, tokenizer: Tokenizer) -> HeldOut:
    """The same, with its tokens and their bytes, each rank having read a part of them. Collective.

    HpctrainError on all ranks where there is no token to be predicted.
    """
    if deck.model.loss is not None or deck.objective.kind not in LANGUAGE_KINDS:
        return held_out
    sizes, counts = token_bytes(tokenizer), torch.zeros(2, dtype=torch.int64)
    with world.agreement():
        for batch in held_out.batches.evaluation(held_out.sequences, world.rank, world.size, 1):
            predicted = batch.targets[batch.targets != MASKED]
            counts[0] += predicted.numel()
            counts[1] += 0 if sizes is None else int(sizes[predicted].sum())
    tokens, text = map(int, world.everyone.all_reduce(counts).tolist())
    with world.agreement():
        if not tokens:
            size = counted(held_out.sequences, "sequence")
            raise HpctrainError(
                f"evaluation set {held_out.name}: its {size} contain no target tokens, so it has no loss "
                "(use more sequences, or another file)"
            )
    batches, sequences = held_out.batches, held_out.sequences
    return HeldOut(held_out.name, batches, sequences, tokens, None if sizes is None else text, in_nats=True)
