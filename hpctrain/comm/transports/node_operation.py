"""Operations in which the ranks of a node use pieces of each other's tensors, round by round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.transports.node_memory import MemoryLocation, NodeMemory
from hpctrain.comm.transports.progress_counters import (
    COPY_ROUND_BYTES,
    ROUNDS,
    STAGED_ROUNDS,
    CounterWork,
    PieceLayout,
    ProgressCounters,
)
from hpctrain.comm.transports.transport import ElementRange, Steps


class PieceRound(NamedTuple):
    """One round of an operation, with a piece for each rank of the node.

    Attributes:
        pieces: Range in the tensor of the piece of each rank.
        owner: Node whose ranks get the result; -1 if all ranks get it.
        first: Number of elements of each slice that earlier rounds handle.
    """

    pieces: Sequence[ElementRange]
    owner: int = -1
    first: int = 0


def rounds_of(slices: Sequence[ElementRange], elements: int, owner: int = -1) -> Iterator[PieceRound]:
    """Yield the rounds in which slices are handled in pieces of at most `elements` elements. Local.

    Args:
        slices: Range of a tensor for each rank of the node, as (first index, number of elements).
        elements: Largest number of elements of a piece.
        owner: Node whose ranks get the result; -1 if all ranks get it. It is only stored in the rounds.

    Yields:
        The rounds, as many as the longest slice needs; none if all slices are empty. Pieces of shorter slices
        are empty in the last rounds.
    """
    longest = max(count for _, count in slices)
    if 0 < longest <= elements:
        yield PieceRound(slices, owner)
        return
    for first in range(0, longest, elements):
        pieces = [(begin + first, max(0, min(elements, count - first))) for begin, count in slices]
        yield PieceRound(pieces, owner, first)


class NodeOperation:
    """Operation of the ranks of a node on one tensor of each rank. All ranks start it in the same order.

    The other ranks use the tensor itself if it is in memory that they see. Otherwise they use copies of the
    pieces of STAGED_ROUNDS rounds. If all ranks have the same piece, there is one copy of it.

    Args:
        counters: Counters of the ranks, which the operation opens.
        tensor: Flat tensor.
        rounds: Rounds in which the pieces of the tensor are used.
        elements: Largest number of elements of a piece in one round.

    Attributes:
        counters: Counters of this operation.
        rank: This rank among the ranks of the node.
        peers: The other ranks of the node.
        is_copy: True if the other ranks use copies, not the tensor itself.

    Raises:
        MemoryError: The system has no memory left.
    """

    def __init__(
        self, counters: ProgressCounters, tensor: Tensor, rounds: Sequence[PieceRound], elements: int
    ) -> None:
        assert len(rounds) < ROUNDS, (tensor.shape, len(rounds))
        self.memory, self.rank, size = counters.memory, counters.rank, counters.size
        self.counters = counters.open()
        self.peers = counters.peers
        self.tensor, self.rounds, self.elements = tensor, rounds, elements
        self._layouts: dict[int, PieceLayout] = {}
        pieces = rounds[0].pieces if rounds else [(0, 0)] * size
        starts = [begin for begin, _ in pieces]
        location = self.memory.find(tensor) if rounds else MemoryLocation(self.memory.rank, 0)
        self.is_copy = location is None
        self._copied = self.peers
        if location is None:
            self._staging = _take_staging(self.memory)
            staged = self._staging.view(tensor.dtype)
            self._staged: Sequence[Tensor] = staged.split(COPY_ROUND_BYTES // tensor.itemsize)
            location = self.memory.find(self._staging)
            assert location is not None
            is_one_piece = len(set(pieces)) == 1
            starts = [0 if is_one_piece else owner * elements for owner in range(size)]
            self._copied = self.peers[:1] if is_one_piece else self.peers
        self._starts: Sequence[int] = starts
        offsets = [start * tensor.itemsize for start in starts]
        self.counters.set_layout(PieceLayout(location, elements, self.is_copy, offsets))

    def piece(self, index: int, owner: int) -> Tensor:
        """Return a view of one rank's piece of a round in this rank's own tensor. Local.

        Args:
            index: Number of the round, from 0.
            owner: Rank of the node whose piece it is.
        """
        begin, length = self.rounds[index].pieces[owner]
        return self.tensor[begin : begin + length]

    def local_piece(self, index: int) -> Tensor:
        """Return a view of this rank's own piece of round `index` in its own tensor. Local."""
        return self.piece(index, self.rank)

    def staged_piece(self, index: int, owner: int) -> Tensor:
        """Return this rank's memory for the copy of a piece of a round, which other ranks see. Local.

        It exists only if `is_copy`. A later round uses the same memory (`reuse_copies`).

        Args:
            index: Number of the round, from 0.
            owner: Rank of the node whose piece it is.
        """
        start, length = self._starts[owner], self.rounds[index].pieces[owner][1]
        return self._staged[index % STAGED_ROUNDS][start : start + length]

    def layout_of(self, peer: int) -> PieceLayout:
        """Return the addresses of the pieces of the tensor of another rank of the node, or of their copies.

        Local. That rank must have made a round ready (`until_ready`); before, the result is meaningless.
        """
        layout = self._layouts.get(peer)
        if layout is None:
            layout = self._layouts[peer] = self.counters.layout_of(peer)
        return layout

    def location_at(self, peer: int, index: int, owner: int) -> MemoryLocation:
        """Return where the piece of a rank starts in the tensor of a rank, or in the copy of that piece.

        Local. All ranks must have the same rounds, and this round of `peer` must be ready.

        Args:
            peer: Rank of the node that has the tensor.
            index: Number of the round, from 0.
            owner: Rank of the node whose piece it is.
        """
        layout = self.layout_of(peer)
        if layout.is_copy:
            return layout.at(owner, index)
        begin = self.rounds[index].pieces[owner][0]
        return MemoryLocation(layout.location.owner, layout.location.offset + begin * self.tensor.itemsize)

    def pieces_of_ranks(self, index: int) -> list[Tensor]:
        """Return views of this rank's piece of round `index` in the tensors of all ranks, by rank. Local.

        For ranks whose tensors are copied, it is the piece in the copy; for this rank, always that in its own
        tensor. All ranks must have the same rounds, and this round must be ready on all of them.
        """
        own, take = self.local_piece(index), self.memory.tensor_at
        locations = [self.location_at(peer, index, self.rank) for peer in self.peers]
        pieces = [take(location, len(own), own.dtype) for location in locations]
        return [*pieces[: self.rank], own, *pieces[self.rank :]]

    def until_ready(self, index: int) -> CounterWork:
        """Return a handle that is complete when all other ranks of the node have made round `index` ready.

        Local.
        """
        return self.counters.until_ready(self.peers, index + 1)

    def publish(self) -> None:
        """Let the other ranks of the node use this rank's tensor. Local; does not wait.

        Each rank calls it once, after the constructor, when its tensor has its values. The caller must not
        change the tensor until the steps that `finish` returns are complete.

        If the other ranks see the tensor itself (`is_copy` is False), all rounds are published: the other
        ranks may use their pieces. Otherwise the pieces of the first STAGED_ROUNDS rounds are copied and
        published. The steps of `reuse_copies`, which the caller runs round by round, do the same for the
        later rounds.
        """
        for index in range(STAGED_ROUNDS if self.is_copy else 0):
            self._copy_round(index)
        if not self.is_copy:
            self.counters.set_ready(len(self.rounds))

    def reuse_copies(self, index: int, copy_back: bool) -> Steps:
        """Return the steps that wait until all other ranks have finished a round, and reuse its memory.

        The later round is STAGED_ROUNDS after it, if there is one; its pieces are copied and published. It is
        for operations with `is_copy`, and called for each round in turn, after `counters.set_finished` for
        this round. With `copy_back` also for the last STAGED_ROUNDS rounds, for which it is not needed
        otherwise.

        Args:
            index: Number of the round that must be finished.
            copy_back: True if the other ranks have written results into the copies, which are then first
                copied into this rank's tensor.
        """
        yield self.counters.until_finished(self.peers, index + 1)
        for owner in self._copied if copy_back else ():
            self.piece(index, owner).copy_(self.staged_piece(index, owner))
        self._copy_round(index + STAGED_ROUNDS)

    def _copy_round(self, index: int) -> None:
        if index < len(self.rounds):
            for owner in self._copied:
                self.staged_piece(index, owner).copy_(self.piece(index, owner))
            self.counters.set_ready(index + 1)

    def finish(self) -> Steps:
        """Return the steps that declare this rank finished, and wait until all other ranks are.

        After them no rank uses this rank's tensor or its copies any more, and the memory of the copies is
        free.
        """
        self.counters.set_finished()
        yield self.counters.until_finished(self.peers)
        if self.is_copy:
            self.memory.free_staging.append(self._staging)


def _take_staging(memory: NodeMemory) -> Tensor:
    """Return memory for copies of STAGED_ROUNDS rounds. `NodeOperation.finish` gives it back.

    Raises:
        MemoryError: The system has no memory left.
    """
    if memory.free_staging:
        return memory.free_staging.pop()
    staging = memory.empty((STAGED_ROUNDS * COPY_ROUND_BYTES,), torch.uint8)
    if staging is None:
        raise MemoryError("the node has no memory left to copy through")
    return staging
