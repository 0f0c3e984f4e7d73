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
    """Yield the rounds in which slices are handled in pieces of so many elements. Local.

    Args:
        slices: Range of a tensor for each rank of the node.
        elements: Largest number of elements of a piece.
        owner: Node whose ranks get the result; -1 if all ranks get it.
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
        """Return the piece of a rank in this rank's tensor."""
        begin, length = self.rounds[index].pieces[owner]
        return self.tensor[begin : begin + length]

    def local_piece(self, index: int) -> Tensor:
        """Return this rank's piece in its own tensor."""
        return self.piece(index, self.rank)

    def staged_piece(self, index: int, owner: int) -> Tensor:
        """Return the memory for a copy of the piece of a rank, which other ranks see."""
        start, length = self._starts[owner], self.rounds[index].pieces[owner][1]
        return self._staged[index % STAGED_ROUNDS][start : start + length]

    def layout_of(self, peer: int) -> PieceLayout:
        """Return where the pieces of another rank are. A round of that rank must be ready."""
        layout = self._layouts.get(peer)
        if layout is None:
            layout = self._layouts[peer] = self.counters.layout_of(peer)
        return layout

    def location_at(self, peer: int, index: int, owner: int) -> MemoryLocation:
        """Return where the piece of the rank `owner` is in the tensor of the rank `peer`, or in its copy.

        All ranks must have the same rounds, and this round of `peer` must be ready.
        """
        layout = self.layout_of(peer)
        if layout.is_copy:
            return layout.at(owner, index)
        begin = self.rounds[index].pieces[owner][0]
        return MemoryLocation(layout.location.owner, layout.location.offset + begin * self.tensor.itemsize)

    def pieces_of_ranks(self, index: int) -> list[Tensor]:
        """Return this rank's piece in the tensor of each rank, or in its copy, in the order of the ranks.

        All ranks must have the same rounds, and this round must be ready on all of them.
        """
        own, take = self.local_piece(index), self.memory.tensor_at
        locations = [self.location_at(peer, index, self.rank) for peer in self.peers]
        pieces = [take(location, len(own), own.dtype) for location in locations]
        return [*pieces[: self.rank], own, *pieces[self.rank :]]

    def until_ready(self, index: int) -> CounterWork:
        """Return a handle that is complete when the other ranks have made a round ready."""
        return self.counters.until_ready(self.peers, index + 1)

    def publish(self) -> None:
        """Let the other ranks use the first STAGED_ROUNDS rounds if they are copied, otherwise all. Local."""
        for index in range(STAGED_ROUNDS if self.is_copy else 0):
            self._copy_round(index)
        if not self.is_copy:
            self.counters.set_ready(len(self.rounds))

    def reuse_copies(self, index: int, copy_back: bool) -> Steps:
        """Return the steps that wait until all have finished a round, and copy a later one into its memory.

        Args:
            index: Index of the round.
            copy_back: True if the other ranks have written into the copies, which become part of the tensor.
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
        """Return the steps that wait until no rank needs this rank's tensor or its copies any more."""
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
