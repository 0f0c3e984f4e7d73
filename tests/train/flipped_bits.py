"""Bits of a run that flip where and when a test says: in memory, in what comes from other ranks, in products.

Of each flip is known where it was, and whether it changed a value by more than rounding does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.audit.audited_transport import AuditedTransport
from hpctrain.audit.message_audit import MessageAudit
from hpctrain.comm.calls import Call
from hpctrain.comm.transports.choose import TransportPair
from hpctrain.comm.transports.reduction import HALVES
from hpctrain.comm.transports.transport import ElementRange, Transport, TransportWork
from hpctrain.comm.world import World
from hpctrain.fault_checks.audit_kernels import AuditKernels, ErrorBounds
from hpctrain.fault_checks.matmul_audit import AuditTarget, GradientSum, MatmulAudit
from hpctrain.parallel.shards import Parameter
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.state import MASTER, MODEL, OPTIMIZER
from hpctrain.sharding.synchronize import GradientSynchronizer
from hpctrain.train.step import ReadBatches, Step, StepResult
from hpctrain.train.trainer import Trainer
from hpctrain.train.training_loop import Loop
from tests.comm.transports.random_calls import Flip as Change
from tests.comm.transports.random_calls import FlippingTransport
from tests.fault_checks.test_matmul_audit import Flip as Wrong
from tests.fault_checks.test_matmul_audit import Flipping
from tests.train.flips import flip

Place = tuple[str, Tensor]

MOMENTS = {
    "parameter": ("between", "within", "summed"),
    "moment": ("between", "within", "summed"),
    "gradient": ("completed", "summed"),
    "sum": ("wire",),
    "message": ("wire",),
    "product": ("kernel",),
}


def parameters(trainer: Trainer) -> list[Place]:
    """The memory of all weights on this rank, of what ranks have in common the rank's own."""
    found = [
        (f"{MODEL}/{segment.parameter.shard.name}", values)
        for bucket in trainer.engine.stage.buckets
        for segment, values, _ in (
            bucket.owned_segments(bucket.owned_values)
            if bucket.values is None or bucket.sharers > 1
            else bucket.segments_within(bucket.values, slice(0, bucket.length))
        )
    ]
    return [*found, *kept(trainer, MASTER)]


def kept(trainer: Trainer, kind: str) -> list[Place]:
    """What the optimizer keeps of such a kind."""
    state = trainer.engine.state()
    return [(f"{each.kind}/{each.shard.name}", each.values) for each in state if each.kind.startswith(kind)]


def gradients(buckets: Sequence[Bucket]) -> list[Place]:
    """Sums that this rank is to update by."""
    return [
        (f"gradient/{segment.parameter.shard.name}", values)
        for bucket in buckets
        for segment, values, _ in bucket.owned_segments(bucket.owned_gradients)
    ]


@dataclass
class Planted:
    """A flip of `rank` in the step after `step` others; shares say in which place, element and bit.

    Once it was there: `names` and `phase` that a fault of it has, and whether the value changed by more than
    `rounding`.
    """

    kind: str
    step: int
    rank: int
    moment: str
    shares: tuple[float, float, float]
    met: bool = False
    happened: bool = False
    above: bool = False
    names: tuple[str, ...] = ()
    phase: str = ""
    how: str = ""

    def change(self, places: Sequence[Place]) -> None:
        """Flip a bit of one of the places."""
        there = [each for each in places if each[1].numel()]
        name, values = there[int(self.shares[0] * len(there))]
        element, bit = (
            int(share * many)
            for share, many in zip(self.shares[1:], (values.numel(), 8 * values.itemsize), strict=True)
        )
        before = float(values[element])
        flip(values, element, bit)
        delta = abs(float(values[element]) - before)
        self.happened, self.names = True, (name,)
        self.phase = "synchronize" if self.kind == "gradient" else "other"
        self.above = not delta <= torch.finfo(values.dtype).eps / 2 * abs(before)  # NaN is more, too
        self.how = (
            f"{self.moment}, element {element} of {values.numel()}, bit {bit}, from {before} by {delta}"
        )


@dataclass
class Campaign:
    """The flips of one run, and what makes them."""

    flips: list[Planted]
    rank: int
    only_sums: bool
    watch: Callable[[Loop], None] = lambda _: None
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    usual: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    now: Planted | None = None
    trainer: Trainer | None = None
    kernel: Flipping = field(default_factory=Flipping)

    def begin(self, trainer: Trainer) -> None:
        """A step is about to be made."""
        for moment, count in self.counts.items():  # of the shortest step, as of one that was cut off
            self.usual[moment] = min(self.usual.get(moment, count), count)
        self.trainer, self.counts = trainer, defaultdict(int)
        due = (each for each in self.flips if each.step == trainer.state.step and not each.met)
        self.now = next(due, None)
        if self.now is not None and self.now.moment in {"wire", "kernel"}:
            self.now.met = True

    def turn(self, moment: str) -> bool:
        """Whether it is the turn of the step's flip, at one of several such moments."""
        number, self.counts[moment] = self.counts[moment], self.counts[moment] + 1
        due = self.now
        if due is None or due.rank != self.rank or due.moment != moment or due.happened:
            return False
        return number == int(due.shares[0] * self.usual[moment])

    def at(self, moment: str, buckets: Sequence[Bucket] = ()) -> None:
        """What lies in memory changes, if its moment is this one."""
        due, mine = self.now, moment != "completed" or self.turn(moment)
        if due is None or due.met or due.moment != moment or not mine:
            return
        due.met = True
        assert self.trainer is not None
        if due.rank == self.rank:
            engine = self.trainer.engine
            match due.kind:
                case "parameter":
                    due.change(parameters(self.trainer))
                case "moment":
                    due.change(kept(self.trainer, OPTIMIZER))
                case _:
                    due.change(gradients(buckets or engine.stage.buckets))

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Have all of it happen."""
        make, call, accumulate = Trainer.train_step, Step.__call__, Step.accumulate
        complete, run, wrap = GradientSynchronizer._complete, Loop.run, MessageAudit.wrap

        def train_step(trainer: Trainer, batch: int | None = None) -> StepResult:
            self.begin(trainer)
            self.at("between")
            return make(trainer, batch)

        def called(step: Step, *given: Any) -> StepResult:
            self.at("within")
            due, kernel = self.now, self.kernel
            mine = due is not None and due.kind == "product" and due.rank == self.rank and not due.happened
            wrong = None
            if mine and due is not None:
                wrong = Wrong(int(due.shares[0] * self.usual["products"]), *due.shares[1:])
            kernel.begin_step(wrong)
            try:
                return call(step, *given)
            finally:
                self.counts["products"] = kernel.calls

        def accumulated(step: Step, *given: Any) -> tuple[Tensor, ReadBatches]:
            result = accumulate(step, *given)
            self.at("summed")
            return result

        def completed(synchronizer: GradientSynchronizer, but: int) -> None:
            while len(synchronizer._in_flight) > but:
                bucket = synchronizer._in_flight[0][0].bucket
                complete(synchronizer, len(synchronizer._in_flight) - 1)
                self.at("completed", [bucket])

        def whole(loop: Loop, *given: Any) -> Any:
            self.watch(loop)
            self.watch_products(loop.trainer)
            return run(loop, *given)

        def wired(audit: MessageAudit, pair: TransportPair, *others: Any) -> TransportPair:
            return wrap(audit, (Wire(pair[0], self), pair[1]), *others)

        patch.setattr(Trainer, "train_step", train_step)
        patch.setattr(Step, "__call__", called)
        patch.setattr(Step, "accumulate", accumulated)
        patch.setattr(GradientSynchronizer, "_complete", completed)
        patch.setattr(Loop, "run", whole)
        patch.setattr(MessageAudit, "wrap", wired)
        known = AuditedTransport.run

        def named(transport: AuditedTransport, outer: Call) -> TransportWork | None:
            inner = transport.inner
            if isinstance(inner, Wire):
                inner.group, inner.phase = outer.group.name, transport.channel.ledger.phase
            return known(transport, outer)

        patch.setattr(AuditedTransport, "run", named)

    def watch_products(self, trainer: Trainer) -> None:
        """Have products computed by what can flip a bit, and know whose they are."""
        audit = trainer.engine.stage.layer_context.products.audit
        if audit is not None:
            assert not trainer.engine.stage.layer_context.products.kernels.chosen
            trainer.engine.stage.layer_context.products.kernels.default = self.kernel
            WatchedProducts(self, audit, trainer.world)


class WatchedProducts:
    """What an audit is told of products, and how it judges them: where a flip is, and what is allowed."""

    def __init__(self, campaign: Campaign, audit: MatmulAudit, world: World) -> None:
        self.campaign, self.world, self.row = campaign, world, -1
        self.judged, self.adding, self.compare = audit.check_product, audit.expect_addition, audit._compare
        self.kernels, self.judge = audit._kernels, audit._kernels.judge
        audit.check_product, audit.expect_addition = self._product, self._add  # type: ignore[method-assign]
        audit._compare = self._compared  # type: ignore[method-assign]
        self.kernels.judge = self._judge  # type: ignore[method-assign]

    def _note(self, number: int, weights: Sequence[Parameter], phase: str) -> Planted | None:
        kernel, due = self.campaign.kernel, self.campaign.now
        if kernel.flip is None or kernel.flip.call != number or due is None or due.happened:
            return None
        due.happened, due.phase = True, phase
        due.names = tuple(weight.shard.name for weight in weights)
        return due

    def _product(self, target: AuditTarget, *given: Any, **named: Any) -> None:
        due = self._note(self.campaign.kernel.calls - 1, target.weights[:1], self.world.ledger.phase)
        self.row = -1 if due is None else self.campaign.kernel.row
        self.judged(target, *given, **named)
        self.row = -1

    def _add(self, target: AuditTarget, *given: Any, **named: Any) -> None:
        self._note(self.campaign.kernel.calls, target.weights, "backward")
        self.adding(target, *given, **named)

    def _compared(self, entry: GradientSum) -> None:
        due = self.campaign.now
        names = tuple(weight.shard.name for weight in entry.weights)
        mine = due is not None and due.kind == "product" and due.happened and due.names == names
        gradient = mine and due is not None and due.phase == "backward" and not due.how
        self.row = self.campaign.kernel.row if gradient else -1
        self.compare(entry)
        self.row = -1

    def _judge(
        self,
        bounds: ErrorBounds,
        expected: Tensor,
        there: Tensor,
        added: Tensor,
        squares: Tensor,
        worst: Tensor,
    ) -> None:
        """Of fused weights one comes after the other."""
        if 0 <= self.row < len(there):
            kernel, due = self.campaign.kernel, self.campaign.now
            assert due is not None
            by, ratio = torch.zeros_like(there), torch.zeros(())
            by[self.row] = kernel.by
            AuditKernels.judge(self.kernels, bounds, torch.zeros_like(there), by, added, squares, ratio)
            due.above = not float(ratio) <= 1
            most = kernel.by / kernel.rounding if kernel.rounding else float("inf")
            due.how = f"row {self.row}, by {kernel.by}, {float(ratio)} tolerances, {most} deviations"
        self.row -= len(there)
        self.judge(bounds, expected, there, added, squares, worst)


class Wire(FlippingTransport):
    """What comes to a rank, of which a bit may flip."""

    def __init__(self, inner: Transport, campaign: Campaign) -> None:
        super().__init__(inner, Change(-1, 0, 0))
        self.campaign, self.group, self.phase = campaign, "", ""

    def _is_due(self, call: Call) -> bool:
        if self.campaign.only_sums and (call.reduction != "sum" or call.output is None):
            return False
        if not self._arriving(call) or not self.campaign.turn("wire"):
            return False
        due = self.campaign.now
        assert due is not None
        due.phase = self.phase  # in which it is started: what comes is waited for in another one
        self.flip = Change(self.rank, -1, int(due.shares[1] * 1e9))
        return True

    def _do(self, call: Call, index: int, tensor: Tensor, spans: Sequence[ElementRange]) -> None:
        super()._do(call, index, tensor, spans)
        due, change = self.campaign.now, self.flip
        assert due is not None and change.dtype is not None
        operations = (
            [call.operation] if hasattr(call, "group") else ["all_reduce", "reduce_scatter", "reduce"]
        )
        due.happened = True
        due.names = tuple(f"{operation} of {self.group}" for operation in operations)
        due.how = f"{call.operation} of {self.group}, {tensor.numel()} of {change.dtype}, by {change.delta}"
        due.above = True  # any bit
        if self.campaign.only_sums and change.dtype.is_floating_point:
            adds = 2.0**-53 * tensor.numel() if change.dtype == torch.float64 else 2.0**-24
            rounded = torch.finfo(change.dtype).eps / 2 if change.dtype in HALVES else 0.0
            sent, came = self.absolutes[index], float(tensor.double().abs().nan_to_num(0, 0, 0).sum())
            absolutes = 2 * sent + came  # of all that two ranks gave, or more
            bits = call.operation == "all_reduce"
            due.above = bits or not change.delta <= 3 * (adds + rounded) * absolutes + 1e-32
