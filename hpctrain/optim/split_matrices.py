"""Blocks of which ranks hold pieces: one is joined on all of these, or they divide many among themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.work import Work
from hpctrain.parallel.shard import UpdateBlock
from hpctrain.sharding.bucket_layout import BucketSegment


@dataclass(frozen=True)
class SplitMatrix:
    """A block of this `shape` of which the ranks of `group` hold pieces of shape `local`, which begin at
    `starts`. `work` are the FLOPs of its update.
    """

    shape: tuple[int, ...]
    local: tuple[int, ...]
    group: Group
    starts: Sequence[Sequence[int]]
    work: float

    @staticmethod
    def of(segment: BucketSegment, block: UpdateBlock) -> SplitMatrix | None:
        """Of a parameter whose blocks are cut; None where they are whole. Collective."""
        shard, group = segment.parameter.shard, segment.replication.pieces
        if all(size <= held for size, held in zip(block.shape, shard.local, strict=True)):
            return None
        assert group is not None
        starts = [at % size for at, size in zip(shard.start, block.shape, strict=True)]
        local = tuple(min(size, held) for size, held in zip(block.shape, shard.local, strict=True))
        return SplitMatrix(block.shape, local, group, group.all_gather_object(starts), block.work)

    @property
    def elements(self) -> int:
        """Of a piece."""
        return prod(self.local)

    def join(self, piece: Tensor) -> Tensor:
        """All of it, of this rank's piece. Collective over the group."""
        return self.whole(self.group.all_gather(piece.unsqueeze(0)))

    def whole(self, pieces: Tensor) -> Tensor:
        """All of it, of every rank's piece [rank, *local]."""
        whole = pieces.new_empty(self.shape)
        for start, piece in zip(self.starts, pieces, strict=True):
            into = whole[self._place(start)]
            into.copy_(piece[tuple(slice(0, size) for size in into.shape)])
        return whole

    def cut(self, whole: Tensor, pieces: Tensor) -> None:
        """Every rank's piece of it into `pieces` [rank, *local], zero behind its end."""
        for start, into in zip(self.starts, pieces, strict=True):
            piece = whole[self._place(start)]
            if tuple(piece.shape) != self.local:
                into.zero_()
            into[tuple(slice(0, size) for size in piece.shape)] = piece

    def take(self, whole: Tensor) -> Tensor:
        """This rank's piece of it, zero behind its end."""
        piece = whole[self._place(self.starts[self.group.rank])]
        if tuple(piece.shape) == self.local:
            return piece
        padded = whole.new_zeros(self.local)
        padded[tuple(slice(0, size) for size in piece.shape)] = piece
        return padded

    def _place(self, start: Sequence[int]) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(start, self.local, strict=True))


class SplitMatrices:
    """Cut blocks of one group, of which each rank transforms its share.

    In every of some rounds each rank has at most one: the others send it their pieces, and get theirs of what
    comes of it. These `rounds` have the number of the block of each rank, or None.
    """

    def __init__(
        self, group: Group, blocks: Sequence[SplitMatrix], names: Sequence[Any], dtype: torch.dtype
    ) -> None:
        """Collective: all ranks of the group have pieces of the same blocks, which `names` tell. They send
        each other numbers of this `dtype`.
        """
        self.group, self.blocks, self.dtype = group, blocks, dtype
        named = group.all_gather_object(list(names))
        if any(each != named[0] for each in named):
            raise RuntimeError(f"{group}: ranks hold pieces of different matrices: {named}")
        self.rounds: list[list[int | None]] = []
        # Alike ones meet in a round, and who has done least has the longest of them.
        order = sorted(range(len(blocks)), key=lambda number: -blocks[number].work)
        loads = [0.0] * group.size
        for first in range(0, len(order), group.size):
            of_ranks: list[int | None] = [None] * group.size
            ranks = sorted(range(group.size), key=loads.__getitem__)
            for number, rank in zip(order[first : first + group.size], ranks, strict=False):
                of_ranks[rank] = number
                loads[rank] += blocks[number].work
            self.rounds.append(of_ranks)

    def run(
        self,
        directions: Callable[[int], Tensor] | None,
        transform: Callable[[int, Tensor], Tensor] | None,
        follow: Callable[[int, Tensor], None] | None,
    ) -> None:
        """Have `follow` use this rank's piece of what comes of each block, by number. Collective.

        While one round is transformed, the next one's pieces and what came of the last one are under way.
        """
        rounds = (_TransformRound(self, of_ranks, directions) for of_ranks in self.rounds)
        last, here = None, next(rounds, None)
        while here is not None:
            following = next(rounds, None)
            here.transform(transform)
            if last is not None:
                last.finish(follow)
            last, here = here, following
        if last is not None:
            last.finish(follow)

    def rehearse(self) -> None:
        """Send what `run` does, in its order, without values."""
        self.run(None, None, None)

    def working_bytes(self, of_direction: Callable[[int], int], of_transform: Callable[[int], int]) -> int:
        """Memory that `run` needs in passing; given that of the directions of a block, and what it
        takes beside itself to transform it.
        """
        most, rank, itemsize = 0, self.group.rank, self.dtype.itemsize
        held = [self._elements(of_ranks) * itemsize for of_ranks in self.rounds]
        for at, of_ranks in enumerate(self.rounds):
            copied = max(of_direction(number) for number in of_ranks if number is not None)
            most = max(most, sum(held[max(0, at - 2) : at + 1]) + copied)
            mine = of_ranks[rank]
            if mine is not None:
                whole = prod(self.blocks[mine].shape) * itemsize + of_transform(mine)
                most = max(most, sum(held[max(0, at - 1) : at + 2]) + whole)
        return most

    def sizes(self, of_ranks: Sequence[int | None]) -> list[int]:
        """Elements of this rank's pieces of a round, by who transforms them."""
        return [0 if number is None else self.blocks[number].elements for number in of_ranks]

    def _elements(self, of_ranks: Sequence[int | None]) -> int:
        """Of this rank's pieces of a round, and of all pieces of its block."""
        sizes = self.sizes(of_ranks)
        return sum(sizes) + self.group.size * sizes[self.group.rank]


class _TransformRound:
    """Blocks that are transformed at once, one of each rank; their pieces are sent from the start."""

    def __init__(
        self,
        division: SplitMatrices,
        of_ranks: Sequence[int | None],
        directions: Callable[[int], Tensor] | None,
    ) -> None:
        self._group, self._blocks, self._of_ranks = division.group, division.blocks, of_ranks
        self._mine = of_ranks[self._group.rank]
        self._sizes = division.sizes(of_ranks)
        self._back = [self._sizes[self._group.rank]] * self._group.size
        self._pieces = self._group.empty((sum(self._sizes),), division.dtype)
        self._received = self._group.empty((sum(self._back),), division.dtype)
        if directions is not None:
            for number, into in self._parts():
                into.copy_(directions(number))
        self._work: Work[Tensor] = self._group.start_all_to_all(
            self._pieces, self._received, self._sizes, self._back
        )

    def transform(self, transform: Callable[[int, Tensor], Tensor] | None) -> _TransformRound:
        """Transform this rank's block, and start to send what comes of it, in the memory of the pieces."""
        self._work.wait()
        if self._mine is not None and transform is not None:
            block = self._blocks[self._mine]
            pieces = self._received.view(self._group.size, *block.local)
            block.cut(transform(self._mine, block.whole(pieces)), pieces)
        self._work = self._group.start_all_to_all(self._received, self._pieces, self._back, self._sizes)
        return self

    def finish(self, follow: Callable[[int, Tensor], None] | None) -> None:
        """Have this rank's pieces of what comes of the blocks be used."""
        self._work.wait()
        if follow is not None:
            for number, part in self._parts():
                follow(number, part)

    def _parts(self) -> Iterator[tuple[int, Tensor]]:
        for number, part in zip(self._of_ranks, self._pieces.split(self._sizes), strict=True):
            if number is not None:
                yield number, part.view(self._blocks[number].local)
