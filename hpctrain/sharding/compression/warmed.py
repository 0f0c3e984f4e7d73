"""Exact sums in the first updates and on single ranks, and compressed ones otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor
from typing_extensions import override

from hpctrain.comm.work import Work
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.communication import OneBitTable, TopKTable
from hpctrain.deck.sections.optimizer import SgdTable
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.compression.between import between_nodes
from hpctrain.sharding.reducer import ExactReduction, GradientReduction
from hpctrain.sharding.state import Stateful, StateTensor


class WarmedUpReduction(GradientReduction):
    """Exact sums for `warmup` updates, then another GradientReduction, whose state does not change before."""

    def __init__(self, bucket: Bucket, reduction: GradientReduction, warmup: int) -> None:
        self.exact, self.reduction, self.warmup = ExactReduction(bucket), reduction, warmup
        self._now: GradientReduction = self.exact

    @property
    @override
    def scratch_bytes(self) -> int:
        return max(self.exact.scratch_bytes, self.reduction.scratch_bytes)

    @override
    def begin(self, updates: int) -> None:
        self._now = self.exact if updates < self.warmup else self.reduction
        self._now.begin(updates)

    @override
    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        return self._now.start(gradients, sums)

    @override
    def after_step(self, updated: bool, factor: float) -> None:
        self.reduction.after_step(updated, factor)

    def state(self) -> Iterator[StateTensor]:
        """Yield all tensors of the state. They are the same tensors in every step."""
        if isinstance(self.reduction, Stateful):
            yield from self.reduction.state()


def with_exact_warmup(
    make: Callable[[Deck, Bucket], GradientReduction],
) -> Callable[[Deck, Bucket], GradientReduction]:
    """Return a function that makes a reduction with exact sums during the deck's `warmup`.

    If a rank sums with no other, all sums are exact.
    """
    make = between_nodes(make)

    def made(deck: Deck, bucket: Bucket) -> GradientReduction:
        if bucket.sharding.group.size == 1:
            return ExactReduction(bucket)
        warmup = deck.communication.warmup
        return WarmedUpReduction(bucket, make(deck, bucket), warmup) if warmup else make(deck, bucket)

    return made


def updates_before_reduced_momentum(deck: Deck) -> int | None:
    """Return the number of updates after which reductions return gradients that include momentum.

    From then on the optimizer applies no momentum of its own. None means never.
    """
    form, rule = deck.communication.compression, deck.optimizer.rule
    has_momentum = isinstance(rule, SgdTable) and rule.momentum > 0
    is_reduced = isinstance(form, OneBitTable) or (
        isinstance(form, TopKTable) and form.ratio < 1 and has_momentum
    )
    return deck.communication.warmup if is_reduced else None
