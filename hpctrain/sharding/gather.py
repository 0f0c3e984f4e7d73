"""Parameters of which a rank keeps a slice, gathered for as long as a layer computes with them (ZeRO-3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.work import Work
from hpctrain.parallel.residency import Residency
from hpctrain.parallel.shard import Parameter
from hpctrain.sharding.bucket import Bucket

Unit = tuple[Bucket, ...]
"""The buckets of what computes together: one, and for a block with experts theirs too."""


class Gatherer(Residency):
    """Gathers the buckets of a unit when it is needed, those of the next one ahead, and frees them after use.

    Slices that lie in files are read one more ahead.

    A step needs its units in the same order as the last one of its kind: that order is recorded, and the
    second step of a kind knows what to gather ahead. A unit that is needed twice in a row stays between,
    those of the parameters in `lasting` stay until the end of the step.
    """

    def __init__(self, units: Iterable[Unit], lasting: Collection[Parameter] = ()) -> None:
        self._unit = {s.parameter: unit for unit in units for bucket in unit for s in bucket.segments}
        self._lasting = {self._unit[parameter] for parameter in lasting}
        self._holds: Counter[Unit] = Counter()
        self._coming: dict[Bucket, Work[Tensor]] = {}
        self._orders: dict[Hashable, list[Unit]] = {}
        self._known: list[Unit] = []
        self._seen: list[Unit] = []

    @contextmanager
    def step(self, kind: Hashable) -> Iterator[None]:
        """One step of a kind; steps of a kind use parameters in one order. Nothing is gathered after it."""
        self._known, self._seen = self._orders.get(kind, []), []
        yield
        for bucket, work in self._coming.items():
            bucket.show_values(work.wait())
        for bucket in dict.fromkeys(bucket for unit in self._unit.values() for bucket in unit):
            bucket.drop_fetched()
            if bucket.values is not None:
                bucket.hide_values()
        self._coming.clear()
        self._holds.clear()
        self._orders[kind] = self._seen
        self._known, self._seen = [], []

    @contextmanager
    def held(self, parameter: Parameter) -> Iterator[None]:
        """Gathered within."""
        unit = self._unit[parameter]
        self.enter(unit)
        yield
        self.leave(unit)

    def around(self, parameter: Parameter, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`compute(x)`, gathered in its forward and again in its backward."""
        unit = self._unit[parameter]
        recording = torch.is_grad_enabled()
        if recording:
            trained = any(s.parameter.requires_grad for bucket in unit for s in bucket.segments)
            if not x.requires_grad and trained:
                x = x.detach().requires_grad_()  # so that the end of its backward is seen
            x = _InBackward.apply(x, self.leave, unit)
        self.enter(unit)
        y = compute(x)
        self.leave(unit)
        if recording:
            y = _InBackward.apply(y, self.enter, unit)
        return y

    def enter(self, unit: Unit) -> None:
        """Have the unit gathered, and start to gather the one that will be needed next."""
        for bucket in unit:
            if bucket.values is None and bucket not in self._coming:
                self._coming[bucket] = bucket.start_gather()
        for bucket in unit:
            if bucket.values is None:
                bucket.show_values(self._coming.pop(bucket).wait())
        self._holds[unit] += 1
        self._seen.append(unit)
        for bucket in self._following():
            if bucket.values is None and bucket not in self._coming:
                self._coming[bucket] = bucket.start_gather()
        for bucket in self._following(1):
            if bucket.values is None and bucket not in self._coming:
                bucket.start_fetch()

    def leave(self, unit: Unit) -> None:
        """Free the unit, unless it is still in use, lasting, or needed next."""
        self._holds[unit] -= 1
        if not self._holds[unit] and unit not in self._lasting and self._following() is not unit:
            for bucket in unit:
                bucket.hide_values()

    def _following(self, but: int = 0) -> Unit:
        """What will be needed next, or `but` so many later, as far as the recorded order holds."""
        index = len(self._seen)
        if index + but >= len(self._known) or self._known[index - 1] is not self._seen[-1]:
            return ()
        return self._known[index + but]


def make_residency(
    buckets: Sequence[Bucket],
    together: Iterable[Sequence[Parameter]],
    blocks: Sequence[Parameter],
    lasting: int,
) -> Residency:
    """How layers come to the parameters of these buckets, of which those of each unit compute `together`.

    Of the blocks, each named by one of its parameters, the last `lasting` stay gathered.
    """
    cut = {s.parameter: bucket for bucket in buckets if bucket.sharding.zero == 3 for s in bucket.segments}
    if not cut:
        return Residency()
    units = (tuple(dict.fromkeys(cut[p] for p in unit if p in cut)) for unit in together)
    return Gatherer(units, blocks[max(0, len(blocks) - lasting) :])


class _InBackward(torch.autograd.Function):
    """Passes x on; when its gradient comes, the action is done with the unit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, action: Callable[[Unit], None], unit: Unit) -> Tensor:
        ctx.action, ctx.unit = action, unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.action(ctx.unit)
        return gradient, None, None
