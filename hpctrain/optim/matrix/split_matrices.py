"""Transformation of matrices that are split between ranks: each rank transforms some of them as a whole.

Gathering each matrix on all ranks would repeat the same work on each of them. Instead, each matrix is sent to
one rank, which transforms it and sends the pieces of the result back. `optim/matrix/__init__.py` has an
example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.work import Work
from hpctrain.parallel.shards import UpdateBlock
from hpctrain.sharding.bucket_layout import BucketSegment


@dataclass(frozen=True)
class SplitMatrix:
    """Matrix of which each rank of a group holds a piece.

    Attributes:
        shape: Shape of the matrix.
        local: Shape of a piece, which may end with padding.
        group: Ranks that hold pieces.
        starts: First index of each rank's piece in the matrix.
        extents: Shape of each rank's piece without padding.
        work: FLOPs of its transformation.
    """

    shape: tuple[int, ...]
    local: tuple[int, ...]
    group: Group
    starts: Sequence[Sequence[int]]
    extents: Sequence[Sequence[int]]
    work: float

    @staticmethod
    def of(segment: BucketSegment, block: UpdateBlock) -> SplitMatrix | None:
        """Return how the blocks of a parameter are split, or None if each rank holds whole blocks.

        Collective over the ranks that hold pieces of the parameter.
        """
        shard, group = segment.parameter.shard, segment.replication.pieces
        if all(size <= local_size for size, local_size in zip(block.shape, shard.local, strict=True)):
            return None
        assert group is not None
        start = [first % size for first, size in zip(shard.start, block.shape, strict=True)]
        local = tuple(
            min(size, local_size) for size, local_size in zip(block.shape, shard.local, strict=True)
        )
        unpadded = shard.unpadded_local or shard.local
        extent = [
            max(0, min(size - first, *sizes))
            for size, first, *sizes in zip(block.shape, start, local, unpadded, strict=True)
        ]
        all_starts, all_extents = zip(*group.all_gather_object((start, extent)), strict=True)
        return SplitMatrix(block.shape, local, group, all_starts, all_extents, block.work)

    @property
    def elements(self) -> int:
        """Number of elements of a piece."""
        return prod(self.local)

    def gather(self, piece: Tensor) -> Tensor:
        """Gather the matrix on every rank from the ranks' pieces. Collective over the group."""
        return self.assemble(self.group.all_gather(piece.unsqueeze(0)))

    def assemble(self, pieces: Tensor) -> Tensor:
        """Return the matrix that consists of the pieces of all ranks, which have shape [rank, *local]."""
        matrix = pieces.new_empty(self.shape)
        for rank, piece in enumerate(pieces):
            matrix[self._index(rank)] = piece[self._real_part(rank)]
        return matrix

    def split(self, matrix: Tensor, pieces: Tensor) -> None:
        """Copy the matrix into the pieces of all ranks, of shape [rank, *local], with zeros as padding."""
        for rank, target in enumerate(pieces):
            piece = matrix[self._index(rank)]
            if tuple(piece.shape) != self.local:
                target.zero_()
            target[self._real_part(rank)] = piece

    def local_piece(self, matrix: Tensor) -> Tensor:
        """Return this rank's piece of the matrix, with zeros as padding. It may be a view of the matrix."""
        piece = matrix[self._index(self.group.rank)]
        if tuple(piece.shape) == self.local:
            return piece
        padded = matrix.new_zeros(self.local)
        padded[self._real_part(self.group.rank)] = piece
        return padded

    def _index(self, rank: int) -> tuple[slice, ...]:
        """Return the index of a rank's piece, without padding, in the matrix."""
        sizes = zip(self.starts[rank], self.extents[rank], strict=True)
        return tuple(slice(start, start + size) for start, size in sizes)

    def _real_part(self, rank: int) -> tuple[slice, ...]:
        """Return the index of what is not padding in a rank's piece."""
        return tuple(slice(0, size) for size in self.extents[rank])


class MatrixExchange:
    """Assignment of split matrices to the ranks that transform them, and the messages that this needs.

    Attributes:
        group: Ranks that hold pieces of the matrices.
        matrices: The split matrices, all over this group.
        dtype: dtype of the messages.
        rounds: For each round, the number of the matrix that each rank transforms, or None.
    """

    def __init__(
        self, group: Group, matrices: Sequence[SplitMatrix], names: Sequence[Any], dtype: torch.dtype
    ) -> None:
        """Assign the matrices to ranks. Collective over the group.

        Args:
            group: Ranks that hold pieces of the matrices.
            matrices: The split matrices, in the same order on all ranks.
            names: Name of each matrix, to check that all ranks have the same ones.
            dtype: dtype of the messages.

        Raises:
            RuntimeError: If ranks have different names.
        """
        self.group, self.matrices, self.dtype = group, matrices, dtype
        names_of_ranks = group.all_gather_object(list(names))
        if any(each != names_of_ranks[0] for each in names_of_ranks):
            raise RuntimeError(f"{group}: ranks hold pieces of different matrices: {names_of_ranks}")
        self.rounds: list[list[int | None]] = []
        # A round has matrices of similar sizes. The rank with the least work gets the largest of them.
        order = sorted(range(len(matrices)), key=lambda number: -matrices[number].work)
        loads = [0.0] * group.size
        for first in range(0, len(order), group.size):
            assignment: list[int | None] = [None] * group.size
            ranks = sorted(range(group.size), key=loads.__getitem__)
            for number, rank in zip(order[first : first + group.size], ranks, strict=False):
                assignment[rank] = number
                loads[rank] += matrices[number].work
            self.rounds.append(assignment)

    def run(
        self,
        directions: Callable[[int], Tensor] | None,
        transform: Callable[[int, Tensor], Tensor] | None,
        apply: Callable[[int, Tensor], None] | None,
    ) -> None:
        """Transform all matrices. Collective over the group.

        While a round is transformed, the pieces of the next round and the results of the last one are sent.
        Without functions, only the messages are sent.

        Args:
            directions: Returns this rank's piece of the matrix with a given number.
            transform: Returns the transformed matrix of a number, given the whole matrix, in its shape. It is
                called for the matrices that are assigned to this rank.
            apply: Receives the number of a matrix and this rank's piece of the transformed matrix.
        """
        rounds = (_TransformRound(self, assignment, directions) for assignment in self.rounds)
        last, current = None, next(rounds, None)
        while current is not None:
            following = next(rounds, None)
            current.transform(transform)
            if last is not None:
                last.finish(apply)
            last, current = current, following
        if last is not None:
            last.finish(apply)

    def piece_sizes(self, assignment: Sequence[int | None]) -> list[int]:
        """Return the elements of this rank's pieces of a round, by the rank that transforms the matrix."""
        return [0 if number is None else self.matrices[number].elements for number in assignment]


class _TransformRound:
    """Matrices that are transformed at the same time, at most one on each rank.

    The constructor starts to send the pieces.
    """

    def __init__(
        self,
        exchange: MatrixExchange,
        assignment: Sequence[int | None],
        directions: Callable[[int], Tensor] | None,
    ) -> None:
        self._group, self._matrices, self._assignment = exchange.group, exchange.matrices, assignment
        self._assigned = assignment[self._group.rank]
        self._sizes = exchange.piece_sizes(assignment)
        self._received_sizes = [self._sizes[self._group.rank]] * self._group.size
        self._pieces = self._group.empty((sum(self._sizes),), exchange.dtype)
        self._received = self._group.empty((sum(self._received_sizes),), exchange.dtype)
        if directions is not None:
            for number, target in self._local_pieces():
                target.copy_(directions(number))
        self._work: Work[Tensor] = self._group.start_all_to_all(
            self._pieces, self._received, self._sizes, self._received_sizes
        )

    def transform(self, transform: Callable[[int, Tensor], Tensor] | None) -> None:
        """Transform this rank's matrix, and start to return the pieces of the result."""
        self._work.wait()
        if self._assigned is not None and transform is not None:
            matrix = self._matrices[self._assigned]
            pieces = self._received.view(self._group.size, *matrix.local)
            matrix.split(transform(self._assigned, matrix.assemble(pieces)), pieces)
        self._work = self._group.start_all_to_all(
            self._received, self._pieces, self._received_sizes, self._sizes
        )

    def finish(self, apply: Callable[[int, Tensor], None] | None) -> None:
        """Wait for this rank's pieces of the results, and pass them to `apply`."""
        self._work.wait()
        if apply is not None:
            for number, piece in self._local_pieces():
                apply(number, piece)

    def _local_pieces(self) -> Iterator[tuple[int, Tensor]]:
        for number, piece in zip(self._assignment, self._pieces.split(self._sizes), strict=True):
            if number is not None:
                yield number, piece.view(self._matrices[number].local)
