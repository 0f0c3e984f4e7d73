"""The section [batch], and the checks of its keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hpctrain.deck.key import Section, key
from hpctrain.deck.problem import DeckProblem, multiples
from hpctrain.deck.relations import Above, AtMost, Relations, Requires

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


MOST_MICRO_BATCHES = 65_536
"""Largest number of micro-batches of a rank in one step, since a schedule lists the actions of each."""
MOST_PASSES = 1 << 20
"""Largest number of passes of micro-batches through parts of the model in one schedule."""

RELATIONS: Relations = (
    AtMost("batch.ramp_from", "batch.global_size", because="the batch grows to that size"),
    Requires("batch.ramp_from", "batch.ramp_steps", Above(0)),
    Requires("batch.ramp_steps", "batch.ramp_from", Above(0)),
)


def batch_size_problems(
    deck: Deck, data_ranks: int, sizes: Mapping[str, int] | None = None
) -> Iterator[DeckProblem]:
    """Yield a problem for each batch size that does not divide into micro-batches on `data_ranks` data ranks.

    A size has to be a multiple of batch.micro_size x data_ranks, or 0.

    Args:
        deck: The deck, whose batch.micro_size counts.
        data_ranks: Number of data ranks.
        sizes: Sizes in sequences by the full names of their keys; None for batch.global_size and
            batch.ramp_from of the deck.
    """
    batch = deck.batch
    unit = batch.micro_size * data_ranks
    sizes = sizes or {"batch.global_size": batch.global_size, "batch.ramp_from": batch.ramp_from}
    for name, size in sizes.items():
        if size % unit:
            yield DeckProblem(
                name,
                f"must be a multiple of batch.micro_size x data ranks = {batch.micro_size} x {data_ranks} = "
                f"{unit} (use {multiples(size, unit)})",
                ("batch.micro_size", "layout.data"),
            )


def micro_batch_problems(deck: Deck, data_ranks: int) -> Iterator[DeckProblem]:
    """Yield a problem if a rank has more micro-batches in a step than a schedule can list; at most one.

    The bounds are MOST_MICRO_BATCHES, and MOST_PASSES for micro-batches x parts of the model.

    Args:
        deck: The deck.
        data_ranks: Number of data ranks, by which the global batch is divided.
    """
    batch, parts = deck.batch, deck.layout.pipeline * deck.layout.chunks
    unit, most = batch.micro_size * data_ranks, min(MOST_MICRO_BATCHES, MOST_PASSES // parts)
    if batch.global_size > most * unit:
        yield DeckProblem(
            "batch.global_size",
            f"divides into {batch.global_size // unit} micro-batches of batch.micro_size x data ranks = "
            f"{batch.micro_size} x {data_ranks} = {unit}, more than the limit of {most} (use "
            f"{most * unit} or less)",
            ("batch.micro_size", "layout.data", "layout.pipeline", "layout.chunks"),
        )
