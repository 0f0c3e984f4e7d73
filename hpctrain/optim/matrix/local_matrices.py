"""The matrices of one parameter that this rank updates, with their state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from hpctrain.optim.matrix.matrix_rule import CellLayout, MatrixRule
from hpctrain.optim.matrix.split_matrices import SplitMatrix
from hpctrain.optim.optimizer import ElementBatch
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketSegment
from hpctrain.sharding.state import MASTER, OPTIMIZER, UPDATED, StateTensor, segment_state


@dataclass(frozen=True)
class LocalMatrices:
    """Matrices of one parameter whose state this rank holds, whole or as pieces.

    Attributes:
        bucket: Bucket of the parameter.
        segment: Place of the parameter in the bucket.
        span: Elements of these matrices, counted from the first element that this rank updates.
        first: Number of the first matrix in the parameter's local piece.
        count: Number of matrices.
        local: Shape of a matrix, or of its piece.
        state: Flat tensors by name, with a number for each element or, if `cells` has the name, for each
            cell.
        cells: Layouts of the states that have one number for each cell.
        split_matrix: How the matrices are split between ranks, or None if they are whole.
    """

    bucket: Bucket
    segment: BucketSegment
    span: slice
    first: int
    count: int
    local: tuple[int, ...]
    state: Mapping[str, Tensor]
    cells: Mapping[str, CellLayout]
    split_matrix: SplitMatrix | None

    @staticmethod
    def of(rule: MatrixRule, bucket: Bucket, segment: BucketSegment, master: Tensor) -> LocalMatrices:
        """Return this rank's matrices of a parameter for a new optimizer, with state of zeros.

        Collective over the ranks that hold pieces of the parameter.

        Args:
            rule: Update rule of the parameter.
            bucket: Bucket of the parameter.
            segment: Place of the parameter in the bucket.
            master: Master weights of the elements that this rank updates in the bucket.
        """
        shard, block = segment.parameter.shard, segment.parameter.update_block
        assert block is not None
        updated, elements = bucket.owned_slice, block.elements(shard)
        start = min(max(segment.start, updated.start), updated.stop)
        # No rank updates the padding of a piece that is longer than the global tensor.
        length = prod(shard.clipped_local) if shard.is_longer else segment.length
        stop = max(start, min(segment.start + length, updated.stop))
        count, rest = divmod(stop - start, elements)
        assert not rest, f"{shard.name}: a matrix is cut"
        span = slice(start - updated.start, stop - updated.start)
        state, cells = {MASTER: master[span]}, {}
        for name, cell in rule.cells(shard).items():
            numbers = elements
            if cell is not None:
                cells[name] = CellLayout.of(shard, block, cell)
                numbers = prod(cells[name].block_shape)
            state[name] = torch.zeros(count * numbers, device=master.device)
        first, split = (start - segment.start) // elements if count else 0, SplitMatrix.of(segment, block)
        return LocalMatrices(bucket, segment, span, first, count, block.local(shard), state, cells, split)

    @property
    def is_exchanged(self) -> bool:
        """True if each matrix is transformed by one of the ranks that hold pieces of it.

        With state of cells, all of these ranks need the transformed matrix, so each of them transforms it.
        """
        return self.split_matrix is not None and not self.cells

    @property
    def is_replicated(self) -> bool:
        """True if all ranks of the bucket's group hold the matrices and share out their transformations.

        With state of cells, each rank transforms all of them, so that this state needs no messages.
        """
        sharding = self.bucket.sharding
        return sharding.zero == 0 and sharding.group.size > 1 and not self.cells

    def update(self, rule: MatrixRule, updates: float, learning_rate: float, gradient_divisor: float) -> None:
        """Update all matrices. Collective over the ranks that hold pieces of them.

        Args:
            rule: Update rule of the matrices.
            updates: Number of updates before this one.
            learning_rate: Learning rate of the step.
            gradient_divisor: Number by which the gradients are divided.
        """
        for number in range(self.count):
            batch = self.element_batch(number, updates)
            directions = rule.direction(with_fp32_gradients(batch), gradient_divisor)
            rule.apply(batch, self.transform(rule, number, directions), learning_rate)

    def transform(self, rule: MatrixRule, number: int, directions: Tensor) -> Tensor:
        """Return this rank's piece of the transformed directions of a matrix.

        Collective over the ranks that hold pieces of the matrix.

        Args:
            rule: Update rule of the matrices.
            number: Number of the matrix among these.
            directions: This rank's piece of its directions.
        """
        cells = {name: self._view(self.state[name], number, self._state_shape(name)) for name in self.cells}
        directions = directions.to(rule.dtype)
        if self.split_matrix is None:
            return rule.transform(directions, cells)
        return self.split_matrix.local_piece(rule.transform(self.split_matrix.gather(directions), cells))

    def element_range(self, number: int) -> slice:
        """Return the elements of a matrix, counted from the first element of the bucket."""
        start = self.bucket.owned_slice.start + self.span.start + number * prod(self.local)
        return slice(start, start + prod(self.local))

    def is_assigned(self, number: int) -> bool:
        """Return True if this data rank transforms a matrix. If several data ranks hold it, only one does.

        With state of cells, all of them do. If the matrix `is_exchanged`, one of the tensor ranks of the data
        rank transforms it.
        """
        elements, share = self.element_range(number), self.bucket.slice
        return not self.is_replicated or share.start <= elements.start < share.stop

    def element_batch(self, number: int, updates: float) -> ElementBatch:
        """Return a matrix, or this rank's piece of it, as the argument of `direction` and `apply` of a rule.

        It has views of gradients, in the dtype of the bucket's gradients, and of all state except the state
        of cells.

        Args:
            number: Number of the matrix among these.
            updates: Number of updates before this one.
        """
        gradients, parameter = self.bucket.owned_gradients[self.span], self.segment.parameter
        flats = {name: flat for name, flat in self.state.items() if name not in self.cells}
        return ElementBatch(
            {name: self._view(flat, number, self.local) for name, flat in flats.items()},
            self._view(gradients, number, self.local),
            torch.full((), updates, device=gradients.device),
            parameter.update_settings,
            parameter.shard,
        )

    def state_tensors(self) -> Iterator[StateTensor]:
        """Yield the state of these matrices, without the master weights."""
        shard = self.segment.parameter.shard
        for name, flat in self.state.items():
            if name == MASTER:
                continue
            in_cells, split = name in self.cells, self.split_matrix
            offset = self.first * prod(self._state_shape(name))
            shape = self.cells[name].shard if in_cells else shard
            joined = split.group if in_cells and split is not None else None
            options = replace(UPDATED, shape=shape, same_values_group=joined)
            yield segment_state(f"{OPTIMIZER}{name}", self.segment, flat, offset, self.bucket, options)

    def _state_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a state of one matrix."""
        return self.cells[name].block_shape if name in self.cells else self.local

    def _view(self, flat: Tensor, number: int, shape: Sequence[int]) -> Tensor:
        elements = prod(shape)
        return flat[number * elements : (number + 1) * elements].view(torch.Size(shape))


def with_fp32_gradients(batch: ElementBatch) -> ElementBatch:
    """Return a batch with its gradients in fp32, which are a copy if they had another dtype."""
    return replace(batch, gradients=batch.gradients.float())
