"""What operations that cross between nodes have in common: the ways of a rank, and the rounds of a tensor
that the ranks of its node see of each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.transports.mpi import MpiRequests, MpiTransport
from hpctrain.comm.transports.node_memory import MemoryLocation, NodeMemory
from hpctrain.comm.transports.progress_counters import ROUNDS, OperationCounters, PieceLayout
from hpctrain.comm.transports.shared import ROUND_BYTES, STAGED_ROUNDS, SharedTransport, take_staging
from hpctrain.comm.transports.transport import ElementRange, Steps

_WORD = torch.zeros(1, dtype=torch.uint8)


class NodeLinks(NamedTuple):
    """How a rank reaches those of its node, and those of its place on every node."""

    inside: SharedTransport
    across: MpiTransport

    @property
    def memory(self) -> NodeMemory:
        """Of the node."""
        return self.inside.memory

    @property
    def node(self) -> int:
        """This one, among those of the group."""
        return self.across.rank

    @property
    def nodes(self) -> int:
        """How many there are."""
        return self.across.size

    @property
    def place(self) -> int:
        """This rank's, among those of its node."""
        return self.inside.rank

    @property
    def local(self) -> int:
        """Ranks of each node."""
        return self.inside.size

    @property
    def others(self) -> list[int]:
        """Their places, but this rank's."""
        return [place for place in range(self.local) if place != self.place]


def piece_elements(piece_bytes: int, itemsize: int, local: int) -> int:
    """Elements of a piece: the memory for copies has room for one of each rank of the node."""
    return max(1, min(piece_bytes, ROUND_BYTES // local) // itemsize)


@dataclass(frozen=True)
class PieceRound:
    """A piece of each local rank's slice: where it begins in the tensor, and its elements.

    They belong to `owner`, a node, at `first` of its ranks' parts of the whole; -1: to all.
    """

    cuts: Sequence[ElementRange]
    owner: int = -1
    first: int = 0


def rounds_of(slices: Sequence[ElementRange], elements: int, owner: int = -1) -> Iterator[PieceRound]:
    """Slices, in pieces of so many elements."""
    for first in range(0, max(count for _, count in slices), elements):
        cuts = [(begin + first, max(0, min(elements, count - first))) for begin, count in slices]
        yield PieceRound(cuts, owner, first)


class InternodeOperation:
    """An operation under way: a tensor for the ranks of the node to see, and what they give each other.

    A tensor that they do not see is copied, round by round, through memory with room for STAGED_ROUNDS of
    these.
    """

    def __init__(
        self, ways: NodeLinks, piece_bytes: int, tensor: Tensor, rounds: Sequence[PieceRound]
    ) -> None:
        self.ways, self.tensor, self.rounds = ways, tensor, rounds
        self.slot: OperationCounters = ways.inside.boards.open()
        self.place, self.others = ways.place, ways.others
        self.elements = piece_elements(piece_bytes, tensor.itemsize, ways.local)
        self.tag, self._invited = ways.across.next_tag(), ways.across.next_tag()
        assert len(rounds) < ROUNDS, (tensor.shape, len(rounds))
        memory, itemsize = ways.memory, tensor.itemsize
        place = memory.find(tensor) if rounds else MemoryLocation(memory.rank, 0)
        self._staging = None
        self._turns: Sequence[Tensor] = ()
        self._theirs: dict[int, PieceLayout] = {}
        self._sends: list[MpiRequests] = []
        starts, stride, turns = [0] * ways.local, 0, ROUNDS
        if place is None:
            self._staging = take_staging(ways.memory)
            place = memory.find(self._staging)
            assert place is not None
            stride, turns = self._staging.nbytes // STAGED_ROUNDS, STAGED_ROUNDS
            copied = self._staging.view(tensor.dtype)
            self._turns = copied.split(len(copied) // STAGED_ROUNDS)
            starts = [peer * self.elements * itemsize for peer in range(ways.local)]
        self.slot.lay(PieceLayout(place, self.elements, stride, turns, starts))

    @property
    def copies(self) -> bool:
        """Whether the others see copies."""
        return self._staging is not None

    def own(self, turn: int) -> Tensor:
        """This rank's own piece of a round."""
        begin, length = self.rounds[turn].cuts[self.place]
        return self.tensor[begin : begin + length]

    def theirs(self, peer: int, turn: int, cut: int) -> MemoryLocation:
        """Where a local rank has the piece of a round that is that of the rank `cut`."""
        pieces = self._theirs.get(peer)
        if pieces is None:
            pieces = self._theirs[peer] = self.slot.pieces(peer)
        if pieces.turns != ROUNDS:
            return pieces.at(cut, turn)
        begin = self.rounds[turn].cuts[cut][0]
        return MemoryLocation(pieces.place.owner, pieces.place.offset + begin * self.tensor.itemsize)

    def send(self, part: Tensor, node: int) -> MpiRequests:
        """Send to the rank of this one's place on another node, which is ready for it."""
        sent = self._message(part, node, self.tag, sends=True)
        self._sends = [*(each for each in self._sends if not each.test()), sent]
        return sent

    def receive(self, into: Tensor, node: int) -> MpiRequests:
        """Receive from there."""
        return self._message(into, node, self.tag, sends=False)

    def invite(self, node: int) -> None:
        """Tell the rank of this one's place on another node that it may send something."""
        self._sends.append(self._message(_WORD, node, self._invited, sends=True))

    def invited(self, node: int) -> MpiRequests:
        """Until the one there has told so once more."""
        return self._message(torch.empty_like(_WORD), node, self._invited, sends=False)

    def _message(self, part: Tensor, node: int, tag: int, sends: bool) -> MpiRequests:
        octets, none = part.view(torch.uint8), [(0, 0)] * self.ways.nodes
        spans = [(0, len(octets)) if other == node else (0, 0) for other in range(len(none))]
        given, taken = (spans, none) if sends else (none, spans)
        return self.ways.across.exchange(octets, given, octets, taken, tag)

    def copied(self, turn: int, cut: int) -> Tensor:
        """Where the others see a copy of the rank `cut`'s piece of a round."""
        start = cut * self.elements
        return self._turns[turn % STAGED_ROUNDS][start : start + self.rounds[turn].cuts[cut][1]]

    def part(self, turn: int, cut: int) -> Tensor:
        """That piece of the tensor."""
        begin, length = self.rounds[turn].cuts[cut]
        return self.tensor[begin : begin + length]

    def end(self) -> Steps:
        """Wait until nobody needs anything of it."""
        self.slot.finish()
        yield self.slot.finished(self.others)
        yield from self._sends
        if self._staging is not None:
            self.ways.memory.staging.append(self._staging)
