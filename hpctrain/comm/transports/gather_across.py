"""Gathering over nodes: each rank fetches what ranks of its place have elsewhere, see `hierarchical`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hpctrain.comm.transports.crossing import InternodeOperation, NodeLinks, piece_elements, rounds_of
from hpctrain.comm.transports.mpi import MpiRequests
from hpctrain.comm.transports.shared import STAGED_ROUNDS
from hpctrain.comm.transports.transport import ConditionWork, ElementRange, ParallelWork, SteppedWork, Steps


class InternodeGather(InternodeOperation):
    """All ranks' `spans` of the output, in bytes."""

    def __init__(
        self, ways: NodeLinks, piece_bytes: int, tensor: Tensor, output: Tensor, spans: Sequence[ElementRange]
    ) -> None:
        local, nodes, node = ways.local, ways.nodes, ways.node
        elements = piece_elements(piece_bytes, 1, local)
        # The node's own, then those of the nodes behind it: which come first.
        order = [(node + step) % nodes for step in range(nodes)]
        rounds = [
            each
            for other in order
            for each in rounds_of(spans[other * local : (other + 1) * local], elements, other)
        ]
        super().__init__(ways, piece_bytes, output, rounds)
        begin, count = spans[node * local + ways.place]
        self.source, self.begin = output[begin : begin + count], begin
        if count and tensor.data_ptr() != self.source.data_ptr():
            self.source.copy_(tensor)
        self._free = STAGED_ROUNDS

    def steps(self) -> Steps:
        """From each rank's own to all of them."""
        ways = self.ways
        came = {
            turn: self.receive(self.own(turn), each.owner)
            for turn, each in enumerate(self.rounds)
            if each.owner != ways.node and each.cuts[self.place][1]
        }
        nodes = [(ways.node - step) % ways.nodes for step in range(1, ways.nodes)]
        for node in nodes:
            self.invite(node)
        sending = [SteppedWork(self._hand(node)) for node in nodes]
        yield ParallelWork(
            [*sending, SteppedWork(self._give(came)), SteppedWork(self._take()), SteppedWork(self._turn())]
        )
        yield from self.end()

    def _hand(self, node: int) -> Steps:
        """Send this rank's own to another node."""
        yield self.invited(node)
        for turn, each in enumerate(self.rounds):
            if each.owner == self.ways.node and each.cuts[self.place][1]:
                self.send(self.own(turn), node)

    def _give(self, came: dict[int, MpiRequests]) -> Steps:
        """Let the ranks of the node see what has come."""
        for turn in range(len(self.rounds)):
            yield came.pop(turn, None)
            if self.copies:
                yield ConditionWork(lambda turn=turn: turn < self._free)  # type: ignore[misc]
                self.copied(turn, self.place).copy_(self.own(turn))
            self.slot.give(turn + 1)

    def _take(self) -> Steps:
        """Take what the ranks of the node have, but where it is one memory."""
        memory = self.ways.memory
        for turn in range(len(self.rounds)):
            yield self.slot.given(self.others, turn + 1)
            for peer in self.others:
                part, place = self.part(turn, peer), self.theirs(peer, turn, peer)
                if len(part) and memory.find(part) != place:
                    part.copy_(memory.at(place, len(part), part.dtype))
            self.slot.finish(turn + 1)

    def _turn(self) -> Steps:
        """Use the memory for copies again once all are done with a round."""
        for turn in range(len(self.rounds) if self.copies else 0):
            yield self.slot.finished(self.others, turn + 1)
            self._free = turn + 1 + STAGED_ROUNDS
