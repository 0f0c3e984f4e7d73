"""The section [batch], and the checks of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpctrain.deck.key import Section, key
from hpctrain.deck.problem import DeckProblem, multiples

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck

_LONGEST = 1_000_000_000


class Batch(Section):
    """Sizes of batches and sequences."""

    global_size: int = key("Sequences of one optimizer step, over all ranks.", unit="sequences", ge=1)
    micro_size: int = key(
        "Sequences of a micro-batch, which a rank computes at a time.", 1, unit="sequences", ge=1
    )
    sequence: int = key(
        "Length of a sequence.", unit="tokens", derived="the preset's, else required", ge=1, le=_LONGEST
    )
    ramp_from: int = key(
        "Batch size of the first step, and the increment by which it grows to global_size; 0: no ramp.",
        0,
        unit="sequences",
        ge=0,
    )
    ramp_steps: int = key("Steps over which the batch grows.", 0, unit="steps", ge=0)


def batch_problems(deck: Deck, ranks: int | None) -> Iterator[DeckProblem]:
    """Yield the problems of the ramp and, if `ranks` is None, of the batch sizes."""
    batch = deck.batch
    sizes = {"batch.global_size": batch.global_size, "batch.ramp_from": batch.ramp_from}
    if ranks is None:
        yield from batch_sizes(batch.micro_size, deck.layout.data or 1, sizes)
    if batch.ramp_from > batch.global_size:
        sentence = f"must be at most batch.global_size = {batch.global_size}, to which it grows"
        yield DeckProblem("batch.ramp_from", sentence, ("batch.global_size",))
    if batch.ramp_from and not batch.ramp_steps:
        yield DeckProblem("batch.ramp_from", "needs batch.ramp_steps of at least 1", ("batch.ramp_steps",))
    if batch.ramp_steps and not batch.ramp_from:
        yield DeckProblem("batch.ramp_steps", "needs batch.ramp_from of at least 1", ("batch.ramp_from",))


MOST_MICRO_BATCHES = 65_536  # micro-batches of a rank in one step: a schedule lists the actions of each


MOST_PASSES = 1 << 20  # passes of micro-batches through the parts of a model in one schedule


def batch_sizes(micro_size: int, data: int, sizes: dict[str, int]) -> Iterator[DeckProblem]:
    """Yield the problems of batch sizes, by name, that do not divide into micro-batches on the data ranks."""
    unit = micro_size * data
    for name, size in sizes.items():
        if size % unit:
            yield DeckProblem(
                name,
                f"must be a multiple of batch.micro_size x data ranks = {micro_size} x {data} = {unit} "
                f"({multiples(size, unit)} would)",
                ("batch.micro_size", "layout.data"),
            )


def micro_batch_problems(deck: Deck, data: int) -> Iterator[DeckProblem]:
    """Yield the problem of more micro-batches in a step, on `data` data ranks, than a schedule can list."""
    batch, parts = deck.batch, deck.layout.pipeline * deck.layout.chunks
    unit, most = batch.micro_size * data, min(MOST_MICRO_BATCHES, MOST_PASSES // parts)
    if batch.global_size > most * unit:
        yield DeckProblem(
            "batch.global_size",
            f"makes {batch.global_size // unit} micro-batches of batch.micro_size x data ranks = "
            f"{batch.micro_size} x {data} = {unit}; must make at most {most} ({most * unit} would do)",
            ("batch.micro_size", "layout.data", "layout.pipeline", "layout.chunks"),
        )
