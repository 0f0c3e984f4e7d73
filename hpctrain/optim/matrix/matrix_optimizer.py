"""Optimizer whose rule needs whole matrices, for all layouts. The head of the package explains these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.optim.matrix.exchanged_matrices import ExchangedMatrices
from hpctrain.optim.matrix.local_matrices import LocalMatrices
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.optim.matrix.replicated_matrices import ReplicatedMatrices
from hpctrain.optim.optimizer import ElementBatch, Optimizer, UpdateRule, is_master
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketSegment, UpdateRange
from hpctrain.sharding.state import MASTER, OPTIMIZER, UPDATED, StateTensor, segment_state


class MatrixOptimizer(Optimizer):
    """Optimizer of whole matrices by one rule, and of all other elements by another one.

    The state is on the device. Parameters that are not trained stay as they are.
    """

    def __init__(self, rules: MatrixRules, buckets: Sequence[Bucket]) -> None:
        """Make the state of this rank's matrices and elements. Collective over all ranks of the mesh."""
        masters = [_master(bucket) for bucket in buckets]
        super().__init__(None, buckets, [{MASTER: master} for master in masters])
        self.updates = 0
        self._rules = rules
        self._ranges: list[_ElementRange] = []
        self._parameters: list[LocalMatrices] = []
        self._replicated: list[ReplicatedMatrices] = []
        updated_alone: list[LocalMatrices] = []
        for bucket, master in zip(buckets, masters, strict=True):
            for treated in bucket.layout.update_ranges:
                if treated.update_settings.in_blocks:
                    segments = _segments_within(bucket, treated)
                    parameters = [LocalMatrices.of(rules.blocks, bucket, each, master) for each in segments]
                    self._parameters += parameters
                    trained = [each for each in parameters if each.segment.parameter.requires_grad]
                    if trained and all(each.is_replicated for each in trained):
                        self._replicated.append(ReplicatedMatrices(rules.blocks, bucket, treated, trained))
                    else:
                        updated_alone += trained
                else:
                    self._ranges.append(_ElementRange.of(rules.element_state_names, bucket, treated, master))
        self._updated_alone = [each for each in updated_alone if not each.is_exchanged]
        self._exchanged = ExchangedMatrices.all_of(rules.blocks, updated_alone)

    @property
    def working_bytes(self) -> int:
        """Bytes of temporary memory of an update: gathered matrices, directions and fp32 gradients."""
        gathered = sum(sorted(each.bytes for each in self._replicated)[-2:])
        ranges = (each.elements * 4 for each in self._ranges if each.bucket.gradient_dtype != torch.float32)
        parameters = (each.working_bytes(self._rules.blocks) for each in self._parameters)
        exchanged = [*self._exchanged, *(each for some in self._replicated for each in some.exchanged)]
        return max((*ranges, *parameters, *(each.working_bytes for each in exchanged)), default=0) + gathered

    @override
    def step(self, learning_rate: float, gradient_divisor: float) -> None:
        updates = float(self.updates)
        if self._rules.element_rule is not None:
            element_rate = learning_rate * self._rules.element_rate
            self._update_elements(self._rules.element_rule, element_rate, gradient_divisor)
        for parameter in self._updated_alone:
            parameter.update(self._rules.blocks, updates, learning_rate, gradient_divisor)
        for exchanged in self._exchanged:
            exchanged.update(updates, learning_rate, gradient_divisor)
        self._update_replicated(lambda each: each.start(updates, gradient_divisor), learning_rate)
        self.updates += 1
        self.publish()

    def _update_replicated(self, start: Callable[[ReplicatedMatrices], None], learning_rate: float) -> None:
        """Transform the matrices of one bucket while the results of the one before are sent."""
        in_flight: ReplicatedMatrices | None = None
        for each in self._replicated:
            start(each)
            if in_flight is not None:
                in_flight.finish(learning_rate)
            in_flight = each
        if in_flight is not None:
            in_flight.finish(learning_rate)

    def _update_elements(self, rule: UpdateRule, learning_rate: float, gradient_divisor: float) -> None:
        """Update the elements that are in no matrix, all buckets together if their gradients are in fp32."""
        together = (
            [[each for each in self._ranges if each.elements]]
            if all(bucket.gradient_dtype == torch.float32 for bucket in self.buckets)
            else [[each] for each in self._ranges if each.elements]
        )
        for ranges in together:
            batches = [each.element_batch(float(self.updates)) for each in ranges]
            if batches:
                rule.update(batches, learning_rate, gradient_divisor)
            del batches

    @override
    def rehearse(self) -> None:
        for parameter in self._parameters:
            if parameter.segment.parameter.requires_grad:
                parameter.rehearse(self._rules.blocks)
        for exchanged in self._exchanged:
            exchanged.exchange.rehearse()
        self._update_replicated(ReplicatedMatrices.rehearse, 0.0)

    @override
    def state(self) -> Iterator[StateTensor]:
        yield from super().state()
        for each in self._ranges:
            yield from each.state_tensors()
        for parameter in self._parameters:
            yield from parameter.state_tensors()


@dataclass(frozen=True)
class _ElementRange:
    """Neighbouring elements of a bucket with the same settings, updated by the rule of elements.

    `span` are those that this rank updates, counted from the first element of the bucket that it updates.
    """

    bucket: Bucket
    treated: UpdateRange
    span: slice
    state: Mapping[str, Tensor]

    @staticmethod
    def of(names: Sequence[str], bucket: Bucket, treated: UpdateRange, master: Tensor) -> _ElementRange:
        updated = bucket.owned_slice
        first = min(max(treated.part.start, updated.start), updated.stop)
        span = slice(first - updated.start, max(first, min(treated.part.stop, updated.stop)) - updated.start)
        weights = master[span]
        state = {name: torch.zeros(weights.shape, device=weights.device) for name in names}
        return _ElementRange(bucket, treated, span, {MASTER: weights} | state)

    @property
    def elements(self) -> int:
        return self.state[MASTER].numel()

    def element_batch(self, updates: float) -> ElementBatch:
        gradients = self.bucket.owned_gradients[self.span].float()
        count = torch.full((), updates, device=gradients.device)
        return ElementBatch(self.state, gradients, count, self.treated.update_settings)

    def state_tensors(self) -> Iterator[StateTensor]:
        start = self.bucket.owned_slice.start
        part = slice(self.span.start + start, self.span.stop + start)
        starts = {segment.start for segment in _segments_within(self.bucket, self.treated)}
        for name, flat in self.state.items():
            for segment, values, offset in self.bucket.segments_within(flat, part):
                if name != MASTER and segment.start in starts:
                    kind = f"{OPTIMIZER}{name}"
                    yield segment_state(kind, segment, values, offset, self.bucket, UPDATED)


def _segments_within(bucket: Bucket, treated: UpdateRange) -> list[BucketSegment]:
    part = treated.part
    return [segment for segment in bucket.segments if part.start <= segment.start < part.stop]


def _master(bucket: Bucket) -> Tensor:
    values = bucket.owned_values
    assert isinstance(values, Tensor)
    return values if is_master(bucket.dtype, True) else values.float()
