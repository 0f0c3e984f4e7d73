"""Optimizer whose rule needs whole matrices, for all layouts.

`optim/matrix/__init__.py` explains how ranks share the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from typing_extensions import override

from hpctrain.optim.matrix.exchanged_matrices import ExchangedMatrices
from hpctrain.optim.matrix.local_matrices import LocalMatrices
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.optim.matrix.replicated_matrices import ReplicatedMatrices
from hpctrain.optim.optimizer import Optimizer, UpdatedElements, resident_master, update_ranges
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import overlap
from hpctrain.sharding.state import MASTER, OPTIMIZER, UPDATED, StateTensor, segment_state


class MatrixOptimizer(Optimizer):
    """Optimizer of whole matrices by one rule, and of all other elements by another one.

    The state is on the device. Parameters that are not trained stay as they are.

    Attributes:
        rules: The two rules.
        ranges: Elements that are in no matrix.
        parameters: Matrices of each parameter whose state this rank holds.
        replicated: Matrices that all data ranks hold (ZeRO 0).
        exchanged: Matrices that tensor ranks exchange, except those in `replicated`.
    """

    def __init__(self, rules: MatrixRules, buckets: Sequence[Bucket]) -> None:
        """Make the state of this rank's matrices and elements. Collective over all ranks of the mesh."""
        masters = [resident_master(None, bucket) for bucket in buckets]
        super().__init__(None, buckets, [{MASTER: master} for master in masters])
        self.updates = 0
        self.rules = rules
        self.ranges: list[UpdatedElements] = []
        self.parameters: list[LocalMatrices] = []
        self.replicated: list[ReplicatedMatrices] = []
        not_replicated: list[LocalMatrices] = []
        for bucket, master in zip(buckets, masters, strict=True):
            for each in bucket.layout.update_ranges:
                if not each.update_settings.in_blocks:
                    part = overlap(each.part, bucket.owned_slice)
                    state = {name: torch.zeros_like(master[part]) for name in rules.element_state_names}
                    state = {MASTER: master[part]} | state
                    self.ranges.append(UpdatedElements(bucket, part, each.update_settings, state))
                    continue
                parameters = [
                    LocalMatrices.of(rules.matrix_rule, bucket, segment, master)
                    for segment in bucket.segments
                    if each.part.start <= segment.start < each.part.stop
                ]
                self.parameters += parameters
                trained = [matrices for matrices in parameters if matrices.segment.parameter.requires_grad]
                if trained and all(matrices.is_replicated for matrices in trained):
                    self.replicated.append(ReplicatedMatrices(rules.matrix_rule, bucket, each, trained))
                else:
                    not_replicated += trained
        self._not_exchanged = [each for each in not_replicated if not each.is_exchanged]
        self.exchanged = ExchangedMatrices.all_of(rules.matrix_rule, not_replicated)

    @override
    def step(self, learning_rate: float, gradient_divisor: float) -> None:
        updates = float(self.updates)
        if self.rules.element_rule is not None:
            element_rate = learning_rate * self.rules.element_rate
            ranges = [each for each in self.ranges if each.state[MASTER].numel()]
            update_ranges(self.rules.element_rule, ranges, self.updates, element_rate, gradient_divisor)
        for parameter in self._not_exchanged:
            parameter.update(self.rules.matrix_rule, updates, learning_rate, gradient_divisor)
        for exchanged in self.exchanged:
            exchanged.update(updates, learning_rate, gradient_divisor)
        self.update_replicated(lambda each: each.start(updates, gradient_divisor), learning_rate)
        self.updates += 1
        self.copy_to_parameters()

    def update_replicated(self, start: Callable[[ReplicatedMatrices], None], learning_rate: float) -> None:
        """Update the matrices of `replicated`, one bucket after another.

        For each bucket, `start` transforms matrices and starts to send the results. Then `finish` of the
        bucket before it waits for the results and applies them. Collective over each bucket's group and the
        ranks that hold pieces.

        Args:
            start: Function that calls `ReplicatedMatrices.start`. A plan passes one that only sends.
            learning_rate: Learning rate of the step.
        """
        in_flight: ReplicatedMatrices | None = None
        for each in self.replicated:
            start(each)
            if in_flight is not None:
                in_flight.finish(learning_rate)
            in_flight = each
        if in_flight is not None:
            in_flight.finish(learning_rate)

    @override
    def state(self) -> Iterator[StateTensor]:
        yield from super().state()
        for each in self.ranges:
            first = each.bucket.owned_slice.start
            part = slice(first + each.part.start, first + each.part.stop)
            for name, flat in each.state.items():
                for segment, values, offset in each.bucket.segments_within(flat, part):
                    if name != MASTER and segment.parameter.update_settings == each.update_settings:
                        kind = f"{OPTIMIZER}{name}"
                        yield segment_state(kind, segment, values, offset, each.bucket, UPDATED)
        for parameter in self.parameters:
            yield from parameter.state_tensors()
