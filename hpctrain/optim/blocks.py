"""The optimizer whose rule updates parameters in blocks, such as whole matrices.

ZeRO cuts no block: its elements are all one rank's (`sharding/ownership.py`), which has their sums of
gradients, updates them (`own_blocks.py`), and hands them back to the others as it does with any slice. What
all ranks have without ZeRO they share out (`handed_blocks.py`). What the ranks of the axis "tensor" hold in
pieces they join (`cut_blocks.py`), or divide among themselves (`divided_blocks.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.work import Work
from hpctrain.optim.divided_blocks import DividedBlocks
from hpctrain.optim.handed_blocks import HandedBlocks
from hpctrain.optim.matrix_rule import MatrixRules
from hpctrain.optim.optimizer import ElementBatch, Optimizer, UpdateRule, is_master
from hpctrain.optim.own_blocks import OwnBlocks
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketSegment, UpdateRange
from hpctrain.sharding.state import MASTER, OPTIMIZER, StateTensor, segment_state


class MatrixOptimizer(Optimizer):
    """Keeps the state where it is updated. What is not trained stays as it is."""

    def __init__(self, rules: MatrixRules, buckets: Sequence[Bucket]) -> None:
        """Collective."""
        masters = [_master(bucket) for bucket in buckets]
        super().__init__(None, buckets, [{MASTER: master} for master in masters])
        self.updates = 0
        self._rules = rules
        self._runs: list[_ElementRange] = []
        self._blocks: list[OwnBlocks] = []
        self._handed: list[HandedBlocks] = []
        alone: list[OwnBlocks] = []
        for bucket, master in zip(buckets, masters, strict=True):
            for treated in bucket.layout.treated:
                if treated.treatment.in_blocks:
                    segments = _within(bucket, treated)
                    blocks = [OwnBlocks.of(rules.blocks, bucket, each, master) for each in segments]
                    self._blocks += blocks
                    trained = [each for each in blocks if each.segment.parameter.requires_grad]
                    if trained and all(each.handed for each in trained):
                        self._handed.append(HandedBlocks(rules.blocks, bucket, treated, trained))
                    else:
                        alone += trained
                else:
                    self._runs.append(_ElementRange.of(rules.names_of_others, bucket, treated, master))
        self._alone = [each for each in alone if not each.divided]
        self._divided = DividedBlocks.all_of(rules.blocks, alone)

    @property
    def working_bytes(self) -> int:
        """Host memory that pieces of a block are joined in, blocks are handed to others in, and gradients of
        another type copied.
        """
        handed = sum(sorted(each.bytes for each in self._handed)[-2:])
        runs = (run.elements * 4 for run in self._runs if run.bucket.gradient_dtype != torch.float32)
        blocks = (each.working_bytes(self._rules.blocks) for each in self._blocks)
        everywhere = [*self._divided, *(divided for each in self._handed for divided in each.divided)]
        return max((*runs, *blocks, *(each.working_bytes for each in everywhere)), default=0) + handed

    @override
    def step(self, learning_rate: float, gradient_divisor: float) -> None:
        updates = float(self.updates)
        if self._rules.others is not None:
            self._update_others(self._rules.others, learning_rate * self._rules.others_rate, gradient_divisor)
        for blocks in self._alone:
            blocks.update(self._rules.blocks, updates, learning_rate, gradient_divisor)
        for divided in self._divided:
            divided.update(updates, learning_rate, gradient_divisor)
        # While the others' blocks are under way, this rank transforms its next ones.
        under_way: HandedBlocks | None = None
        for handed in self._handed:
            handed.start(updates, gradient_divisor)
            if under_way is not None:
                under_way.finish(learning_rate)
            under_way = handed
        if under_way is not None:
            under_way.finish(learning_rate)
        self.updates += 1
        self.publish()

    def _update_others(self, rule: UpdateRule, learning_rate: float, gradient_divisor: float) -> None:
        """Update the elements that are in no block."""
        together = (
            [[run for run in self._runs if run.elements]]
            if all(bucket.gradient_dtype == torch.float32 for bucket in self.buckets)
            else [[run] for run in self._runs if run.elements]
        )
        for runs in together:
            parts = [run.part(float(self.updates)) for run in runs]
            if parts:
                rule.update(parts, learning_rate, gradient_divisor)
            del parts

    @override
    def rehearse(self) -> None:
        for blocks in self._blocks:
            if blocks.segment.parameter.requires_grad:
                blocks.rehearse(self._rules.blocks)
        for divided in self._divided:
            divided.division.rehearse()
        under_way: Work[Tensor] | None = None
        for handed in self._handed:
            for divided in handed.divided:
                divided.division.rehearse()
            following = handed.hand(handed.empty())
            if under_way is not None:
                under_way.wait()
            under_way = following
        if under_way is not None:
            under_way.wait()

    @override
    def state(self) -> Iterator[StateTensor]:
        yield from super().state()
        for run in self._runs:
            yield from run.state_tensors()
        for blocks in self._blocks:
            yield from blocks.state_tensors()


@dataclass(frozen=True)
class _ElementRange:
    """Neighbouring elements of one bucket that are updated by themselves, and this rank's own of them: `span`
    of all its own.
    """

    bucket: Bucket
    treated: UpdateRange
    span: slice
    state: Mapping[str, Tensor]

    @staticmethod
    def of(names: Sequence[str], bucket: Bucket, treated: UpdateRange, master: Tensor) -> _ElementRange:
        own = bucket.own
        first = min(max(treated.part.start, own.start), own.stop)
        span = slice(first - own.start, max(first, min(treated.part.stop, own.stop)) - own.start)
        weights = master[span]
        state = {name: torch.zeros(weights.shape, device=weights.device) for name in names}
        return _ElementRange(bucket, treated, span, {MASTER: weights} | state)

    @property
    def elements(self) -> int:
        return self.state[MASTER].numel()

    def part(self, updates: float) -> ElementBatch:
        gradients = self.bucket.own_gradients[self.span].float()
        count = torch.full((), updates, device=gradients.device)
        return ElementBatch(self.state, gradients, count, self.treated.treatment)

    def state_tensors(self) -> Iterator[StateTensor]:
        start = self.bucket.own.start
        part = slice(self.span.start + start, self.span.stop + start)
        held = {segment.start for segment in _within(self.bucket, self.treated)}
        for name, flat in self.state.items():
            for segment, values, offset in self.bucket.cut(flat, part):
                if name != MASTER and segment.start in held:
                    kind = f"{OPTIMIZER}{name}"
                    yield segment_state(kind, segment, values, offset, self.bucket, "always", False)


def _within(bucket: Bucket, treated: UpdateRange) -> list[BucketSegment]:
    part = treated.part
    return [segment for segment in bucket.segments if part.start <= segment.start < part.stop]


def _master(bucket: Bucket) -> Tensor:
    values = bucket.own_values
    assert isinstance(values, Tensor)
    return values if is_master(bucket.dtype, True) else values.float()
