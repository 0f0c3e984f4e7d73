"""Sums over nodes: each rank carries a slice through its node, and on to the next, see `hierarchical`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.comm.calls import Operation
from hpctrain.comm.transports.crossing import InternodeOperation, NodeLinks, piece_elements, rounds_of
from hpctrain.comm.transports.mpi import MpiRequests
from hpctrain.comm.transports.reduction import BLOCK, FUNCTIONS, equal_counts
from hpctrain.comm.transports.shared import STAGED_ROUNDS
from hpctrain.comm.transports.transport import (
    ConditionWork,
    ParallelWork,
    SteppedWork,
    Steps,
    ranges_of_ranks,
)

FLIGHT = 4  # pieces of a sum that a rank has memory for
HALVES = frozenset({torch.float16, torch.bfloat16})


class InternodeSum(InternodeOperation):
    """A sum: of all for all, or, with an `output`, of each rank's `counts` elements for it."""

    def __init__(
        self,
        ways: NodeLinks,
        piece_bytes: int,
        tensor: Tensor,
        output: Tensor | None,
        counts: Sequence[int] | None,
        operation: Operation,
    ) -> None:
        local, nodes = ways.local, ways.nodes
        elements = piece_elements(piece_bytes, tensor.itemsize, local)
        if output is None:
            slices = ranges_of_ranks(equal_counts(tensor.numel(), local), tensor, local)
            rounds = list(rounds_of(slices, elements))
        else:
            spans = ranges_of_ranks(counts, tensor, local * nodes)
            of_nodes = [spans[node * local : (node + 1) * local] for node in range(nodes)]
            rounds = [each for node in range(nodes) for each in rounds_of(of_nodes[node], elements, node)]
        super().__init__(ways, piece_bytes, tensor, rounds)
        self.output, self.operation = output, operation
        self.node, self.last = ways.node, nodes - 1
        self.dtype = torch.float32 if operation == "sum" and tensor.dtype in HALVES else tensor.dtype
        self._pieces: Sequence[Tensor] = ()
        self._added = 0
        self._sums: dict[int, MpiRequests] = {}
        self._returned: dict[int, MpiRequests] = {}

    def steps(self) -> Steps:
        """From what is there to the sums."""
        size = max((length for each in self.rounds for _, length in each.cuts), default=0)
        pieces = min(FLIGHT, len(self.rounds))
        scratch = self.ways.across.scratch
        taken = scratch.take(pieces * size, torch.empty(0, dtype=self.dtype)) if size else None
        if taken is not None:
            self._pieces = taken[: pieces * size].split(size)
        if self.copies:
            for turn in range(min(STAGED_ROUNDS, len(self.rounds))):
                self._copy(turn)
        else:
            self.slot.give(len(self.rounds))
        yield ParallelWork(
            [SteppedWork(self._add()), SteppedWork(self._bring_back()), SteppedWork(self._turn())]
        )
        yield from self.end()
        if taken is not None:
            scratch.give(taken)

    def _add(self) -> Steps:
        """Add the node's pieces to those of the nodes before, and send them on."""
        came: dict[int, MpiRequests] = {}
        posted = 0
        for turn, each in enumerate(self.rounds):
            # Messages are awaited some rounds ahead, as soon as what was in their memory has gone.
            while self.node and posted < min(len(self.rounds), turn + FLIGHT - 1):
                yield self._sums.pop(posted - FLIGHT, None)
                if self.rounds[posted].cuts[self.place][1]:
                    came[posted] = self.receive(self._piece(posted), self.node - 1)
                    self.invite(self.node - 1)
                posted += 1
            yield self.slot.given(self.others, turn + 1)
            if each.cuts[self.place][1]:
                yield came.pop(turn) if self.node else self._sums.pop(turn - FLIGHT, None)
                yield self.invited(self.node + 1) if self.node < self.last else None
                self._fold(turn)
            if self.node == self.last or self.output is not None:
                self.slot.finish(turn + 1)
            self._added = turn + 1

    def _fold(self, turn: int) -> None:
        """Add the pieces of a round, and hand on the sum."""
        owner, own, piece = self.rounds[turn].owner, self.own(turn), self._piece(turn)
        places = {peer: self.theirs(peer, turn, self.place) for peer in self.others}
        memory = self.ways.memory
        theirs = {peer: memory.at(place, len(own), own.dtype) for peer, place in places.items()}
        parts = [theirs.get(peer, own) for peer in range(self.ways.local)]
        into = None
        if self.node == self.last:
            into = own if self.output is None else self._result(turn)
        _add(parts, piece, into, self.operation, first=self.node == 0)
        if into is None:
            self._sums[turn] = self.send(piece, self.node + 1)
            if self.output is None:
                self._returned[turn] = self.receive(own, self.node + 1)
            elif owner == self.node:
                self._returned[turn] = self.receive(self._result(turn), self.last)
        elif self.output is None:
            self._write(turn)
            self.send(own, self.node - 1)
        elif owner != self.node:
            self._sums[turn] = self.send(into, owner)

    def _bring_back(self) -> Steps:
        """Take the sums from the node behind, where this is not the last."""
        for turn, each in enumerate(self.rounds if self.node < self.last else ()):
            if self.output is None or each.owner == self.node:
                yield ConditionWork(lambda turn=turn: self._added > turn)  # type: ignore[misc]
                yield self._returned.pop(turn, None)
            if self.output is None:
                if each.cuts[self.place][1]:
                    self._write(turn)
                    if self.node:
                        self.send(self.own(turn), self.node - 1)
                self.slot.finish(turn + 1)

    def _turn(self) -> Steps:
        """Use the memory for copies again once all are done with a round."""
        for turn in range(len(self.rounds) if self.copies else 0):
            yield self.slot.finished(self.others, turn + 1)
            if self.output is None:
                for peer in self.others:
                    self.part(turn, peer).copy_(self.copied(turn, peer))
            if turn + STAGED_ROUNDS < len(self.rounds):
                self._copy(turn + STAGED_ROUNDS)

    def _copy(self, turn: int) -> None:
        for peer in self.others:
            self.copied(turn, peer).copy_(self.part(turn, peer))
        self.slot.give(turn + 1)

    def _write(self, turn: int) -> None:
        """Write the sums of this rank's slice over the others' tensors."""
        own = self.own(turn)
        for peer in self.others:
            self.ways.memory.at(self.theirs(peer, turn, self.place), len(own), own.dtype).copy_(own)

    def _piece(self, turn: int) -> Tensor:
        """Memory for the sum of a round."""
        return self._pieces[turn % FLIGHT][: self.rounds[turn].cuts[self.place][1]]

    def _result(self, turn: int) -> Tensor:
        """Where the sum of a round goes: to its place in the output, or to memory from which it is sent."""
        each, length = self.rounds[turn], self.rounds[turn].cuts[self.place][1]
        if each.owner == self.node:
            assert self.output is not None
            return self.output[each.first : each.first + length]
        piece = self._piece(turn)
        return piece if piece.dtype == self.tensor.dtype else self.tensor.new_empty(length)


def _add(
    parts: Sequence[Tensor], piece: Tensor, into: Tensor | None, operation: Operation, first: bool
) -> None:
    """Reduce a node's parts, in their order, on top of the `piece` that came, or as the `first`: into that
    piece, or where the sum is to go.
    """
    function = FUNCTIONS[operation]
    target = piece if into is None else into
    for *blocks, sums, results in zip(*(part.split(BLOCK) for part in (*parts, piece, target)), strict=True):
        total = None if first else sums
        for index, block in enumerate(blocks):
            if total is None:
                total = block if block.dtype == sums.dtype else sums.copy_(block)
            else:
                ends = index == len(blocks) - 1 and results.dtype == sums.dtype
                total = function(total, block, out=results if ends else sums)  # halves are added to fp32
        if results.dtype != sums.dtype:
            results.copy_(sums)
