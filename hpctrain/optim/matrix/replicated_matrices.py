"""Matrices that all data ranks hold (without ZeRO): each rank transforms its share and sends the results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from hpctrain.comm.work import Work
from hpctrain.optim.matrix.exchanged_matrices import ExchangedMatrices
from hpctrain.optim.matrix.local_matrices import LocalMatrices, with_fp32_gradients
from hpctrain.optim.matrix.matrix_rule import MatrixRule
from hpctrain.optim.optimizer import ElementBatch
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import UpdateRange


class ReplicatedMatrices:
    """Matrices of a bucket that all ranks of its group hold and update.

    Each rank transforms the matrices that start in its share of the bucket. An all-gather brings the
    transformed directions to the others.
    """

    def __init__(
        self, rule: MatrixRule, bucket: Bucket, update_range: UpdateRange, parameters: Sequence[LocalMatrices]
    ) -> None:
        """Prepare the updates of neighbouring parameters. Collective over the ranks that hold pieces.

        Args:
            rule: Update rule of the matrices.
            bucket: Bucket of the parameters.
            update_range: Elements of the parameters in the bucket.
            parameters: Matrices of each parameter.
        """
        self.rule, self.bucket, self.parameters, self.part = rule, bucket, parameters, update_range.part
        borders = [min(max(each, self.part.start), self.part.stop) for each in bucket.layout.borders]
        self._sizes = [last - first for first, last in pairwise(borders)]
        first, last = (each - self.part.start for each in borders[bucket.sharding.group.rank :][:2])
        self._share = slice(first, last)
        self.exchanged = ExchangedMatrices.all_of(rule, parameters)
        self._batches: list[tuple[LocalMatrices, int, ElementBatch]] = []
        self._work: Work[Tensor] | None = None

    def empty_directions(self) -> Tensor:
        """Return uninitialized memory for the transformed directions, flat, in the rule's `dtype`.

        It has one number for each element of all these matrices.
        """
        group = self.bucket.sharding.group
        return group.empty((self.part.stop - self.part.start,), self.rule.dtype)

    def start_gather(self, flat: Tensor) -> None:
        """Start to send this rank's share of the transformed directions to all ranks of the group.

        Collective over the bucket's group. `finish` has to follow.

        Args:
            flat: Transformed directions of all matrices, as from `empty_directions`, of which this rank's
                share is set. The shares of the other ranks arrive in it.
        """
        group = self.bucket.sharding.group
        self._work = group.start_all_gather(flat[self._share], flat, self._sizes)

    def start(self, updates: float, gradient_divisor: float) -> None:
        """Transform this rank's share of the matrices, and start to send the results.

        Collective over the bucket's group and over the ranks that hold pieces. `finish` has to follow.

        Args:
            updates: Number of updates before this one.
            gradient_divisor: Number by which the gradients are divided.
        """
        flat = self.empty_directions()

        def store(parameter: LocalMatrices, number: int, directions: Tensor) -> None:
            flat[self._element_range(parameter, number)].view(parameter.local).copy_(directions)

        for parameter in self.parameters:
            for number in range(parameter.count):
                batch = parameter.element_batch(number, updates)
                self._batches.append((parameter, number, batch))
                if parameter.is_exchanged and parameter.is_assigned(number):
                    continue
                directions = self.rule.direction(with_fp32_gradients(batch), gradient_divisor)
                if parameter.is_assigned(number):
                    store(parameter, number, parameter.transform(self.rule, number, directions))
        for exchanged in self.exchanged:
            exchanged.transform(updates, gradient_divisor, store)
        self.start_gather(flat)

    def finish(self, learning_rate: float) -> None:
        """Wait for the transformed directions of all ranks, and update the weights. Local after `start`."""
        assert self._work is not None
        flat = self._work.wait()
        for parameter, number, batch in self._batches:
            directions = flat[self._element_range(parameter, number)].view(parameter.local)
            self.rule.apply(batch, directions, learning_rate)
        self._batches.clear()
        self._work = None

    def _element_range(self, parameter: LocalMatrices, number: int) -> slice:
        elements = parameter.element_range(number)
        return slice(elements.start - self.part.start, elements.stop - self.part.start)
