"""Sums and gathers over several nodes in which each rank sends one slice of the tensor between nodes.

`hierarchical.py` explains the algorithm. An operation consists of rounds. In each round, every rank of a node
handles a piece of its own slice. The other ranks of the node read and write the tensor itself if it is in
memory that they see, otherwise copies of the pieces of a few rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.calls import Call, Reduction
from hpctrain.comm.transports.mpi import MpiRequests, MpiTransport
from hpctrain.comm.transports.node_operation import NodeOperation, rounds_of
from hpctrain.comm.transports.progress_counters import COPY_ROUND_BYTES, STAGED_ROUNDS
from hpctrain.comm.transports.reduction import FUNCTIONS, HALVES, REDUCTION_BLOCK, equal_counts
from hpctrain.comm.transports.shared import SharedTransport
from hpctrain.comm.transports.transport import (
    ConditionWork,
    ElementRange,
    ParallelWork,
    SteppedWork,
    Steps,
    flat_view,
    ranges_of_ranks,
)

PIECES_IN_FLIGHT = 4
"""Pieces of a sum for which a rank has memory."""

_SIGNAL = torch.zeros(1, dtype=torch.uint8)


class NodeLinks:
    """Transports to the ranks of this node and to the peers on other nodes, in a hierarchical group.

    Args:
        local: Transport among the ranks of this node.
        across: Transport among the peers: the ranks with the same local rank on all nodes.

    Attributes:
        memory: Memory of this node.
        node: Number of this node in the group.
        nodes: Number of nodes.
        local_rank: Number of this rank among the ranks of its node in the group.
        local_size: Number of ranks on each node.
    """

    def __init__(self, local: SharedTransport, across: MpiTransport) -> None:
        self.local, self.across, self.memory = local, across, local.memory
        self.node, self.nodes = across.rank, across.size
        self.local_rank, self.local_size = local.rank, local.size


def piece_elements(piece_bytes: int, itemsize: int, local_size: int) -> int:
    """Return the largest number of elements of a piece, at least 1.

    A piece has at most `piece_bytes`, and so few that the pieces of all ranks of the node fit into
    COPY_ROUND_BYTES.

    Args:
        piece_bytes: Size of a piece in bytes.
        itemsize: Bytes of an element.
        local_size: Number of ranks on each node.
    """
    return max(1, min(piece_bytes, COPY_ROUND_BYTES // local_size) // itemsize)


class InternodeOperation(NodeOperation):
    """Operation over several nodes on one tensor.

    Args:
        links: Transports to other ranks.
        piece_bytes: Size of a piece.
        tensor: Flat tensor.
        slices: For each node whose ranks get a result, in the order in which they are handled, the range of
            the tensor that each rank of this node handles; node -1 stands for all nodes.
    """

    def __init__(
        self,
        links: NodeLinks,
        piece_bytes: int,
        tensor: Tensor,
        slices: Mapping[int, Sequence[ElementRange]],
    ) -> None:
        elements = piece_elements(piece_bytes, tensor.itemsize, links.local_size)
        rounds = [each for owner, ranges in slices.items() for each in rounds_of(ranges, elements, owner)]
        super().__init__(links.local.counters, tensor, rounds, elements)
        self.links = links
        self.tag, self._invitation_tag = links.across.next_tag(), links.across.next_tag()
        self._sends: list[MpiRequests] = []

    def piece_length(self, index: int) -> int:
        """Return the number of elements of this rank's piece in round `index`, perhaps 0."""
        return self.rounds[index].pieces[self.rank][1]

    def send(self, part: Tensor, node: int) -> MpiRequests:
        """Start to send a tensor to this rank's peer on another node, and return its handle.

        Local; does not wait. The peer is the rank with the same local rank. The steps of an operation first
        yield `until_invited(node)`, so that no large message arrives before its memory is known. `finish`
        waits for all sends.

        Args:
            part: Contiguous tensor, which must not change until the handle is complete.
            node: Number of the other node in the group.
        """
        sent = self._message(part, node, self.tag, sends=True)
        self._sends = [*(each for each in self._sends if not each.test()), sent]
        return sent

    def receive(self, target: Tensor, node: int) -> MpiRequests:
        """Start to receive from this rank's peer on another node, and return its handle.

        Local; does not wait.

        Args:
            target: Contiguous tensor that the message fills. It may be read when the handle is complete.
            node: Number of the other node in the group.
        """
        return self._message(target, node, self.tag, sends=False)

    def invite(self, node: int) -> None:
        """Tell this rank's peer on a node that this rank is ready to receive from it. Local; does not wait.

        The caller invites after `receive`. A peer that awaits an invitation (`until_invited`) sends nothing
        before, so that no large message arrives before its memory is known.
        """
        self._sends.append(self._message(_SIGNAL, node, self._invitation_tag, sends=True))

    def until_invited(self, node: int) -> MpiRequests:
        """Return a handle that is complete when the next invitation of the peer on a node has arrived. Local.

        Each call stands for one invitation.
        """
        return self._message(torch.empty_like(_SIGNAL), node, self._invitation_tag, sends=False)

    def _message(self, part: Tensor, node: int, tag: int, sends: bool) -> MpiRequests:
        return self.links.across.start_message(part.view(torch.uint8), node, tag, sends)

    @override
    def finish(self) -> Steps:
        yield from super().finish()
        yield from self._sends


class InternodeSum(InternodeOperation):
    """Reduction over several nodes.

    Args:
        links: Transports to other ranks.
        piece_bytes: Size of a piece.
        call: An all_reduce or reduce_scatter.

    Attributes:
        output: Flat tensor for this rank's elements; None if all ranks get all of them in `tensor`.
    """

    def __init__(self, links: NodeLinks, piece_bytes: int, call: Call) -> None:
        local_size, nodes, tensor = links.local_size, links.nodes, flat_view(call.tensor)
        assert call.reduction is not None
        output = flat_view(call.output) if call.operation == "reduce_scatter" else None
        if output is None:
            slices = {-1: ranges_of_ranks(equal_counts(len(tensor), local_size), tensor, local_size)}
        else:
            ranges = ranges_of_ranks(call.counts, tensor, local_size * nodes)
            slices = {node: ranges[node * local_size :][:local_size] for node in range(nodes)}
        super().__init__(links, piece_bytes, tensor, slices)
        self.output, self.reduction = output, call.reduction
        self.node, self.last = links.node, nodes - 1
        is_wide = call.reduction == "sum" and tensor.dtype in HALVES
        self.dtype = torch.float32 if is_wide else tensor.dtype
        self._partial_sums: Sequence[Tensor] = ()
        self._added_rounds = 0
        self._forwarded: dict[int, MpiRequests] = {}
        self._results: dict[int, MpiRequests] = {}

    def steps(self) -> Steps:
        """Return the steps of the operation, which all ranks of the group run, once for each object.

        Nothing happens before the first one. After them, `output` has this rank's sums of a reduce_scatter,
        and `tensor` has all sums of an all_reduce.
        """
        size = max((length for each in self.rounds for _, length in each.pieces), default=0)
        pieces = min(PIECES_IN_FLIGHT, len(self.rounds))
        scratch = self.links.across.scratch
        memory = scratch.take(pieces * size, torch.empty(0, dtype=self.dtype)) if size else None
        if memory is not None:
            self._partial_sums = memory[: pieces * size].split(size)
        self.publish()
        parts = self._add_rounds(), self._receive_results(), self._reuse_all_copies()
        yield ParallelWork([SteppedWork(part) for part in parts])
        yield from self.finish()
        if memory is not None:
            scratch.give(memory)

    def _add_rounds(self) -> Steps:
        """Add the pieces of this node to the partial sums of the nodes before, and send these on."""
        arriving: dict[int, MpiRequests] = {}
        posted = 0
        for index, each in enumerate(self.rounds):
            # Receive some rounds ahead, as soon as the memory of an earlier partial sum was sent.
            while self.node and posted < min(len(self.rounds), index + PIECES_IN_FLIGHT - 1):
                yield self._forwarded.pop(posted - PIECES_IN_FLIGHT, None)
                if self.piece_length(posted):
                    arriving[posted] = self.receive(self._partial_sum(posted), self.node - 1)
                    self.invite(self.node - 1)
                posted += 1
            yield self.until_ready(index)
            if each.pieces[self.rank][1]:
                if self.node:
                    yield arriving.pop(index)
                else:
                    yield self._forwarded.pop(index - PIECES_IN_FLIGHT, None)
                yield self.until_invited(self.node + 1) if self.node < self.last else None
                self._add_round(index)
            if self.node == self.last or self.output is not None:
                self.counters.set_finished(index + 1)
            self._added_rounds = index + 1

    def _add_round(self, index: int) -> None:
        partial_sum, parts = self._partial_sum(index), self.pieces_of_ranks(index)
        owner, own, target = self.rounds[index].owner, parts[self.rank], None
        if self.node == self.last:
            target = own if self.output is None else self._result(index)
        _add_parts(parts, partial_sum, target, self.reduction, is_first=self.node == 0)
        if target is None:
            self._forwarded[index] = self.send(partial_sum, self.node + 1)
            if self.output is None:
                self._results[index] = self.receive(own, self.node + 1)
            elif owner == self.node:
                self._results[index] = self.receive(self._result(index), self.last)
        elif self.output is None:
            self._write_to_neighbors(index)
            self.send(own, self.node - 1)
        elif owner != self.node:
            self._forwarded[index] = self.send(target, owner)

    def _receive_results(self) -> Steps:
        """On all nodes but the last one, receive the results and send them to the node before."""
        for index in range(len(self.rounds) if self.node < self.last else 0):
            if self.output is None or self.rounds[index].owner == self.node:
                yield self._until_added(index)
                yield self._results.pop(index, None)
            if self.output is None:
                if self.piece_length(index):
                    self._write_to_neighbors(index)
                    if self.node:
                        self.send(self.local_piece(index), self.node - 1)
                self.counters.set_finished(index + 1)

    def _until_added(self, index: int) -> ConditionWork:
        return ConditionWork(lambda: self._added_rounds > index)

    def _reuse_all_copies(self) -> Steps:
        for index in range(len(self.rounds) if self.is_copy else 0):
            yield from self.reuse_copies(index, copy_back=self.output is None)

    def _write_to_neighbors(self, index: int) -> None:
        """Write the results of this rank's piece into the tensors of the other ranks of the node."""
        parts = self.pieces_of_ranks(index)
        for peer in self.peers:
            parts[peer].copy_(parts[self.rank])

    def _partial_sum(self, index: int) -> Tensor:
        return self._partial_sums[index % PIECES_IN_FLIGHT][: self.piece_length(index)]

    def _result(self, index: int) -> Tensor:
        """Return where the result of a round goes: a part of the output, or memory that is sent."""
        each, length = self.rounds[index], self.piece_length(index)
        if each.owner == self.node:
            assert self.output is not None
            return self.output[each.first : each.first + length]
        partial_sum = self._partial_sum(index)
        return partial_sum if partial_sum.dtype == self.tensor.dtype else self.tensor.new_empty(length)


class InternodeGather(InternodeOperation):
    """Gather over several nodes whose result all ranks get.

    Args:
        links: Transports to other ranks.
        piece_bytes: Size of a piece.
        call: An all_gather.
    """

    def __init__(self, links: NodeLinks, piece_bytes: int, call: Call) -> None:
        local_size, nodes, node = links.local_size, links.nodes, links.node
        tensor, output = flat_view(call.tensor), flat_view(call.output)
        counts = call.counts and [count * output.itemsize for count in call.counts]
        tensor, output = tensor.view(torch.uint8), output.view(torch.uint8)
        ranges = ranges_of_ranks(counts, output, local_size * nodes)
        # This node's own bytes come first, then those of the next nodes.
        order = [(node + step) % nodes for step in range(nodes)]
        slices = {other: ranges[other * local_size :][:local_size] for other in order}
        super().__init__(links, piece_bytes, output, slices)
        begin, count = ranges[node * local_size + self.rank]
        source = output[begin : begin + count]
        if count and tensor.data_ptr() != source.data_ptr():
            source.copy_(tensor)
        self._free_rounds = STAGED_ROUNDS

    def steps(self) -> Steps:
        """Return the steps of the operation, which all ranks of the group run.

        Nothing is sent before the first one. After them, the output of the call has the elements of all
        ranks.
        """
        links = self.links
        arriving = {
            index: self.receive(self.local_piece(index), each.owner)
            for index, each in enumerate(self.rounds)
            if each.owner != links.node and each.pieces[self.rank][1]
        }
        nodes = [(links.node - step) % links.nodes for step in range(1, links.nodes)]
        for node in nodes:
            self.invite(node)
        parts = [self._send_to(node) for node in nodes]
        parts += [self._publish_arriving(arriving), self._read_neighbors(), self._free_copies()]
        yield ParallelWork([SteppedWork(part) for part in parts])
        yield from self.finish()

    def _send_to(self, node: int) -> Steps:
        """Send this rank's bytes to its peer on another node."""
        yield self.until_invited(node)
        for index, each in enumerate(self.rounds):
            if each.owner == self.links.node and each.pieces[self.rank][1]:
                self.send(self.local_piece(index), node)

    def _publish_arriving(self, arriving: dict[int, MpiRequests]) -> Steps:
        """Tell the other ranks of the node when each piece has arrived and can be read.

        If they do not see the tensor, the piece is first copied to memory that they see.
        """
        for index in range(len(self.rounds)):
            yield arriving.pop(index, None)
            if self.is_copy:
                yield self._until_free(index)
                self.staged_piece(index, self.rank).copy_(self.local_piece(index))
            self.counters.set_ready(index + 1)

    def _until_free(self, index: int) -> ConditionWork:
        return ConditionWork(lambda: self._free_rounds > index)

    def _read_neighbors(self) -> Steps:
        """Copy the pieces of the other ranks of the node, unless they are in the same memory."""
        memory = self.memory
        for index in range(len(self.rounds)):
            yield self.until_ready(index)
            for peer in self.peers:
                part, location = self.piece(index, peer), self.location_at(peer, index, peer)
                if len(part) and memory.find(part) != location:
                    part.copy_(memory.tensor_at(location, len(part), part.dtype))
            self.counters.set_finished(index + 1)

    def _free_copies(self) -> Steps:
        """Mark the memory of a round as free when all have finished it."""
        for index in range(len(self.rounds) if self.is_copy else 0):
            yield self.counters.until_finished(self.peers, index + 1)
            self._free_rounds = index + 1 + STAGED_ROUNDS


def _add_parts(
    parts: Sequence[Tensor],
    partial_sum: Tensor,
    target: Tensor | None,
    reduction: Reduction,
    is_first: bool,
) -> None:
    """Reduce the parts of a node in order, after the partial sum of the nodes before.

    Args:
        parts: Part of each rank of the node.
        partial_sum: Result of the nodes before, and, if `target` is None, the new result.
        target: Tensor for the result, or None.
        reduction: "sum", "max" or "min".
        is_first: True if there are no nodes before.
    """
    function = FUNCTIONS[reduction]
    results = partial_sum if target is None else target
    tensors = (part.split(REDUCTION_BLOCK) for part in (*parts, partial_sum, results))
    for *blocks, sums, result in zip(*tensors, strict=True):
        total = None if is_first else sums
        for index, block in enumerate(blocks):
            if total is None:
                total = block if block.dtype == sums.dtype else sums.copy_(block)
            else:
                is_last = index == len(blocks) - 1 and result.dtype == sums.dtype
                total = function(total, block, out=result if is_last else sums)  # halves are added to fp32
        if result.dtype != sums.dtype:
            result.copy_(sums)
