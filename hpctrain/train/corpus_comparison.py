"""Comparison of a run's tokenizer and data with those that its initial weights were trained with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.exchange.source import source_state, source_tokenizer
from hpctrain.checkpoint.exchange.source_fingerprint import source_fingerprint
from hpctrain.checkpoint.load import read_state
from hpctrain.checkpoint.stored_deck import stored_deck
from hpctrain.checkpoint.stored_tokenizer import TOKENIZER, stored_settings, tokenizer_state
from hpctrain.comm.world import World
from hpctrain.data.corpus import Corpus
from hpctrain.data.file_contents import TEXT_KIND
from hpctrain.data.token_files import Tokens, title_of
from hpctrain.data.tokenizer_difference import tokenizer_difference
from hpctrain.data.tokenizer_settings import TokenizerSettings
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.mixture import token_file_patterns
from hpctrain.deck.sources import toml_value
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.units import format_count

CORPUS = "corpus"
"""Key of a checkpoint's state for the description of the training data."""

SOURCE = "model_from_fingerprint"
"""Key of a checkpoint's state for the fingerprint of the weights that its run started from."""


def known_corpus(world: World, deck: Deck, corpus: Corpus, checkpoint: Path | None) -> dict[str, Any]:
    """Return the entries of a checkpoint's state for the training data and the tokenizer. Collective.

    The tokenizer is that of the token file, or, with a dataset, that of the model that a run starts from.
    Its settings are those of `checkpoint` or `model.from`, and of the token file: see
    `TokenizerSettings.after_training_on`. The fingerprint of `model.from` stays that of the run's beginning.
    """
    known: dict[str, Any] = {}
    with world.agreement():
        if world.rank == 0:
            # The description of a dataset may differ between ranks; all use that of rank 0.
            known = {**_tokenizer_state(deck, corpus, checkpoint), CORPUS: _describe(corpus)}
            known |= _source_state(deck, checkpoint)
        else:
            _describe(corpus)
    return dict(world.everyone.broadcast_object(known))


def _tokenizer_state(deck: Deck, corpus: Corpus, checkpoint: Path | None) -> dict[str, Any]:
    before: dict[str, Any] = {}
    if checkpoint is not None:
        before = read_state(checkpoint)
    elif deck.model.source is not None:
        before = source_state(Path(deck.model.source), deck.model.vocabulary)
    settings = _with_context(stored_settings(before), before, checkpoint or Path(deck.model.source or ""))
    if corpus.file is None:
        text = before.get(TOKENIZER)
        return tokenizer_state(text, settings) if isinstance(text, str) or settings.files else {}
    entries = [corpus.file] if corpus.trained is None else corpus.trained.tokens
    for tokens in sorted(entries, key=lambda each: each.kind != TEXT_KIND):  # a template of rows comes last
        settings = settings.after_training_on(tokens.tokenizer_settings, tokens.kind == TEXT_KIND)
    return tokenizer_state(corpus.file.tokenizer_text, settings)


def _source_state(deck: Deck, checkpoint: Path | None) -> dict[str, str]:
    """Return the entry of a checkpoint's state with the fingerprint of the weights that its run started from.

    It is empty if the run started from new weights, or with a version that did not store it.
    """
    if checkpoint is not None:
        fingerprint = read_state(checkpoint).get(SOURCE)
        return {SOURCE: fingerprint} if isinstance(fingerprint, str) else {}
    return {} if deck.model.source is None else {SOURCE: source_fingerprint(Path(deck.model.source))}


def require_same_source(
    world: World, deck: Deck, state: Mapping[str, Any], checkpoint: Path, purpose: str
) -> None:
    """Check that `model.from` still names the weights that the run of a checkpoint started from. Collective.

    Older checkpoints do not store a fingerprint of these weights; then nothing is checked.

    Args:
        world: The ranks.
        deck: The deck of the checkpoint.
        state: The state of the checkpoint.
        checkpoint: The checkpoint, for error messages.
        purpose: What these weights are needed for, as a clause, for error messages.

    Raises:
        InputOutputError: The weights are missing, or have changed.
    """
    with world.agreement():
        source = deck.model.source
        if world.rank or source is None:
            return
        title = f"{checkpoint}: {purpose}"
        if not Path(source).exists():
            sentence = f"model.from = {toml_value(source)}, which no longer exists (restore it)"
            raise InputOutputError(f"{title}, {sentence}")
        before = state.get(SOURCE)
        if isinstance(before, str) and (now := source_fingerprint(Path(source))) != before:
            sentence = f"whose weights have changed since then (fingerprint {now}, expected {before})"
            remedy = "restore the original weights"
            raise InputOutputError(f"{title}, model.from = {toml_value(source)}, {sentence}; {remedy}")


def _with_context(settings: TokenizerSettings, state: Mapping[str, Any], path: Path) -> TokenizerSettings:
    """Return the settings with the longest sequences of the runs up to the checkpoint with this state."""
    with suppress(HpctrainError):  # an invalid stored deck is reported elsewhere
        sequence = stored_deck(state, path).batch.sequence
        return replace(settings, context=max(settings.context, sequence))
    return settings


def compare_corpus(world: World, deck: Deck, corpus: Corpus, checkpoint: Path | None) -> list[str]:
    """Compare tokenizer and data with those of the weights, from `checkpoint` or else model.from. Collective.

    Returns:
        Warnings for the user, on rank 0.

    Raises:
        HpctrainError: The tokenizers differ, and data.other_tokenizer does not allow it. Raised on all ranks.
    """
    lines: list[str] = []
    with world.agreement():
        if world.rank == 0 and checkpoint is not None:
            state = read_state(checkpoint)
            if corpus.file is not None:
                text = state.get("tokenizer")
                lines += _compare_tokenizers(deck, corpus.file, f"{checkpoint}", text, "it stores none")
            lines += _compare_corpora(deck, corpus, checkpoint, state)
        elif world.rank == 0 and deck.model.source is not None and corpus.file is not None:
            text, missing = source_tokenizer(Path(deck.model.source))
            lines += _compare_tokenizers(
                deck, corpus.file, f"model.from = {deck.model.source}", text, missing
            )
    return lines


def same_corpus(state: Mapping[str, Any], corpus: Corpus) -> bool:
    """Return False if a checkpoint's state was trained on another corpus. If it names none, return True."""
    before = state.get(CORPUS)
    if before is None:
        return True
    now = _describe(corpus)
    return all(before.get(name) == now[name] for name in ("tokens", "samples", "fingerprint") if name in now)


def corpus_key(deck: Deck) -> tuple[str, str]:
    """Return the deck's key for the training data, and the kind of this data for messages."""
    if deck.data.dataset is not None:
        return "data.dataset", "dataset"
    if deck.data.mixture is not None:
        return "data.mixture", "mixture"
    return "data.tokens", "token file"


def _compare_tokenizers(deck: Deck, file: Tokens, source: str, text: object, missing: str) -> list[str]:
    title = title_of(token_file_patterns(deck))
    unknown = f"the tokenizer of {title} cannot be compared with that of {source}"
    if not isinstance(text, str):
        return [f"{unknown}: {missing}"]
    try:
        difference = tokenizer_difference(file.tokenizer_text, text, file.where, source)
    except HpctrainError as error:
        return [f"{unknown}: {error.problems[0]}"]
    if difference and not deck.data.other_tokenizer:
        raise HpctrainError(
            deck.problem(
                corpus_key(deck)[0],
                f"its tokenizer differs from that of {source}: {difference} (prepare tokens with "
                "`hpctrain prepare --tokenizer`, or set data.other_tokenizer = true to allow this)",
            )
        )
    sentence = f"the tokenizer of {title} differs from that of {source}: {difference}"
    return [sentence] if difference else []


def _compare_corpora(deck: Deck, corpus: Corpus, checkpoint: Path, state: Mapping[str, Any]) -> list[str]:
    if same_corpus(state, corpus):
        return []
    _, what = corpus_key(deck)
    before, now = state[CORPUS], _describe(corpus)
    sizes = f"expected {_size(before)}, got {_size(now)}"
    return [
        f"{_title(deck)} is not the {what} that {checkpoint} was trained on ({sizes}): samples come "
        "in another order, and some may repeat"
    ]


def _size(known: Mapping[str, Any]) -> str:
    """Return the size of a corpus as text, for a dataset with its arguments."""
    if "tokens" in known:
        return f"{format_count(known['tokens'])} tokens"
    return f"{known['samples']} samples of {known['dataset']} with {toml_value(known['arguments'])}"


def _title(deck: Deck) -> str:
    if deck.data.dataset is not None:
        return deck.data.dataset
    return "data.mixture" if deck.data.mixture is not None else title_of(token_file_patterns(deck))


def _describe(corpus: Corpus) -> dict[str, Any]:
    """Return the entry of a checkpoint's state that identifies a corpus."""
    if corpus.dataset is not None:
        return corpus.dataset.description()
    assert corpus.trained is not None
    return corpus.trained.description()
