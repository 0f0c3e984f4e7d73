"""Exact sums at first: what is compressed from some update on, and where there is anybody to sum with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from hpctrain.comm.work import Work
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.communication import OneBitTable, TopKTable
from hpctrain.deck.sections.optimizer import SgdTable
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.compression.between import between_nodes
from hpctrain.sharding.reducer import ExactReduction, GradientReduction
from hpctrain.sharding.state import Stateful, StateTensor


class Warmed:
    """Exact sums for `warmup` updates, then those of another GradientReduction, whose state waits until
    then."""

    def __init__(self, bucket: Bucket, summation: GradientReduction, warmup: int) -> None:
        self.exact, self.summation, self.warmup = ExactReduction(bucket), summation, warmup
        self._now: GradientReduction = self.exact

    @property
    def scratch_bytes(self) -> int:
        """Bytes of memory that the sum uses while it is in flight, without gradients and sums."""
        return max(self.exact.scratch_bytes, self.summation.scratch_bytes)

    def begin(self, updates: int) -> None:
        """Begin a step."""
        self._now = self.exact if updates < self.warmup else self.summation
        self._now.begin(updates)

    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        """Start to sum the gradients of the bucket over the ranks of its group."""
        return self._now.start(gradients, sums)

    def after_step(self, updated: bool, factor: float) -> None:
        """End a step."""
        self.summation.after_step(updated, factor)

    def state(self) -> Iterator[StateTensor]:
        """Yield all tensors of the state. They are the same tensors in every step."""
        if isinstance(self.summation, Stateful):
            yield from self.summation.state()


def exact_at_first(
    make: Callable[[Deck, Bucket], GradientReduction],
) -> Callable[[Deck, Bucket], GradientReduction]:
    """The same, with exact sums for the deck's `warmup`, and throughout where a rank sums with no other."""
    make = between_nodes(make)

    def made(deck: Deck, bucket: Bucket) -> GradientReduction:
        if bucket.sharding.group.size == 1:
            return ExactReduction(bucket)
        warmup = deck.communication.warmup
        return Warmed(bucket, make(deck, bucket), warmup) if warmup else make(deck, bucket)

    return made


def momentum_given_after(deck: Deck) -> int | None:
    """After how many updates sums come with the momentum in them, and the optimizer has none of its own."""
    form, rule = deck.communication.compression, deck.optimizer.rule
    has_momentum = isinstance(rule, SgdTable) and rule.momentum > 0
    given = isinstance(form, OneBitTable) or (isinstance(form, TopKTable) and form.ratio < 1 and has_momentum)
    return deck.communication.warmup if given else None
