"""Decks whose shapes are measured: given ones, or a small and a larger GPT."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpctrain.checkpoint.exchange.source import read_source_keys
from hpctrain.deck.read import parse_deck, read_deck
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.plan.time.step_plan import PREDICTED_VALUES

_DECK = """
[run]
title = "{title}"
steps = 1
[model]
family = "gpt2"
layers = {layers}
hidden = {hidden}
heads = {heads}
vocabulary = {vocabulary}
[data]
tokens = "none"
[batch]
global_size = {micro_size}
micro_size = {micro_size}
sequence = {sequence}
"""
SMALL = {"title": "17M", "layers": 5, "hidden": 512, "heads": 8, "vocabulary": 512}
LARGER = {"title": "124M", "layers": 12, "hidden": 768, "heads": 12, "vocabulary": 50257}
TINY = {"title": "tiny", "layers": 1, "hidden": 32, "heads": 2, "vocabulary": 64}

_VOCABULARY = 32_000
"""Vocabulary of a deck that takes it from its token file."""

_LEAST_TOKENS = 64


def gpt_deck(sizes: Mapping[str, object], micro_size: int, sequence: int, *overrides: str) -> Deck:
    """Return the deck of a GPT.

    Args:
        sizes: Title and sizes of the model.
        micro_size: Sequences of a micro-batch.
        sequence: Tokens of a sequence.
        overrides: Arguments of `--set`.
    """
    return parse_deck(_DECK.format(**sizes, micro_size=micro_size, sequence=sequence), overrides)


def measured_decks(paths: Sequence[Path]) -> list[Deck]:
    """Return the decks in files, or without files, a GPT of 17M and one of 124M parameters.

    Raises:
        HpctrainError: A run of a deck would fail with this error, or its format is not measured.
    """
    if not paths:
        return [gpt_deck(SMALL, 4, 256), gpt_deck(LARGER, 1, 512)]
    decks = [read_deck(path, read_source=read_source_keys) for path in paths]
    for deck in decks:
        if deck.precision.compute == "fp8":
            raise HpctrainError(deck.problem("precision.compute", 'is unsupported (use "bf16")'))
    return [deck.with_keys(model={"vocabulary": deck.model.vocabulary or _VOCABULARY}) for deck in decks]


def variants(deck: Deck, ranks: int) -> Iterator[tuple[Deck, int, int]]:
    """Yield the deck on data ranks, with fewer tokens in a micro-batch, and with its layers split.

    Each comes with its number of tokens and of tensor ranks.
    """
    tokens, micro_size = deck.batch.micro_size * deck.batch.sequence, deck.batch.micro_size
    data_parallel = on_data_ranks(deck, ranks)
    yield data_parallel, tokens, 1
    for part in (2, 4):
        if micro_size % part == 0:
            fewer = {"micro_size": micro_size // part}
        elif micro_size == 1 and part == 2 and tokens // part >= _LEAST_TOKENS:
            fewer = {"sequence": deck.batch.sequence // part}
        else:
            continue
        yield data_parallel.with_keys(batch=fewer), tokens // part, 1
    if ranks % 2 == 0 and deck.model.heads % 2 == 0:
        yield data_parallel.with_keys(layout={"tensor": 2}), tokens, 2


def on_data_ranks(deck: Deck, ranks: int) -> Deck:
    """Return the deck on data ranks with one micro-batch each.

    Features whose time is not predicted are turned off.
    """
    axes = ("tensor", "context", "pipeline", "chunks", "expert", "expert_tensor")
    layout: dict[str, object] = {**dict.fromkeys(axes, 1), "data": None, "split": None, "schedule": "1f1b"}
    values: dict[str, dict[str, object]] = {
        "layout": layout | {"auto": False, "sequence_parallel": False, "zero": 0, "zero_group": None},
        "batch": {"global_size": deck.batch.micro_size * ranks, "ramp_from": 0},
        "communication": {"server": None},
        "run": {"noise_scale_steps": 0},
    }
    for key, value in PREDICTED_VALUES.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
    values["memory"]["recompute"] = "none"
    return deck.with_keys(**values)
