"""Traffic of a call: bytes that pass a rank's link to other nodes, and rounds of messages.

The ledger counts the payload, which does not depend on the number of ranks. This module computes what passes
a link with the algorithms of `reduction`, in which pieces go straight to their owners. For S bytes and N
ranks on nodes of their own it is, in each direction if nothing else is said:

    all_reduce               2 S (N-1)/N   2 rounds: parts to the owners, then sums to the other ranks
    reduce_scatter           S (N-1)/N     1 round
    all_gather, all_to_all   S (N-1)/N     1 round; for uneven pieces without the rank's own
    broadcast                S             log2 N rounds: out at the root, in at other ranks
    gather, scatter          S (N-1)/N     1 round at the root; other ranks move their own piece
    reduce                   2 S (N-1)/N   2 rounds: in at the root; other ranks send S
    send, recv               S             the sender sends S in 0 rounds; the receiver gets it in 1 round
    barrier                  nothing       log2 N rounds

Traffic to ranks of the same node is not counted. If each byte crosses links once (`hierarchical`), a rank of
N nodes with L ranks each has the following traffic; sums of half types count as fp32 on their way:

    all_reduce       forward: S/L to the next node, except on the last node; N-1 rounds
                     back: S/L to the previous node, except on the first; 1 round per node from the last one
    reduce_scatter   forward: S/L to the next node, except on the last node; N-1 rounds
                     back: on the last node S/L (N-1)/N to the other nodes; 1 round on these
    all_gather       S/L (N-1)/N; 1 round
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpctrain.comm.calls import Call
from hpctrain.units import Link


class Traffic(NamedTuple):
    """Traffic of a rank.

    Attributes:
        sent: Bytes to other nodes.
        received: Bytes from other nodes.
        rounds: Messages of which each must wait for the one before.
    """

    sent: int = 0
    received: int = 0
    rounds: int = 0

    def seconds(self, link: Link) -> float:
        """Return the seconds of this transfer over a link that nothing else uses, in both directions at once.

        It is the larger number of bytes at the speed of the link, and its latency for each round.
        """
        return max(self.sent, self.received) / link.bytes_per_second + self.rounds * link.latency


def traffic_of(
    call: Call, rank: int, size: int, nodes: Sequence[int] | None = None, crosses_links_once: bool = False
) -> Traffic:
    """Return the bytes that this rank sends to and receives from other nodes in a call, and its rounds.

    Local. It follows from sizes alone; nothing is measured. If no rank of the group is on another node, all
    numbers are 0.

    Args:
        call: The call. Its tensors must not have been dropped yet (`Call.release`, when it is complete),
            since uneven pieces and all-to-alls are sized by them.
        rank: This rank in the group.
        size: Number of ranks of the group.
        nodes: Node of each rank of the group; None if each rank is a node of its own.
        crosses_links_once: True for the hierarchical algorithm (`Transport.crosses_links_once`). Only
            all_reduce, reduce_scatter and all_gather have it; other collective calls raise an AssertionError.
            Each node must then have equally many, consecutive ranks. False if pieces go straight to their
            owners.
    """
    nodes = range(size) if nodes is None else nodes
    if call.peer >= 0:
        if nodes[call.peer] == nodes[rank]:
            return Traffic()
        return Traffic(call.bytes, 0, 0) if call.operation == "send" else Traffic(0, call.bytes, 1)
    far = [other for other in range(size) if nodes[other] != nodes[rank]]
    if not far:
        return Traffic()
    if crosses_links_once:
        return _hierarchical_traffic(call, rank, size, size // len(set(nodes)))
    total, own, tree = call.bytes, _piece_bytes(call, rank, size), (size - 1).bit_length()
    far_bytes = total * len(far) // size
    if call.counts:
        far_bytes = sum(_piece_bytes(call, other, size) for other in far)
    is_root = call.root == rank
    is_far = call.root < 0 or nodes[call.root] != nodes[rank]
    match call.operation:
        case "all_reduce":
            both = 2 * total * len(far) // size
            return Traffic(both, both, 2)
        case "reduce_scatter":
            return Traffic(far_bytes, len(far) * own, 1)
        case "all_gather":
            return Traffic(len(far) * own, far_bytes, 1)
        case "all_to_all":
            assert call.output is not None
            received = call.output.nbytes * len(far) // size
            if call.receive_counts is not None:
                received = sum(call.receive_counts[other] for other in far) * call.output.itemsize
            return Traffic(far_bytes, received, 1)
        case "broadcast":
            if is_root:
                return Traffic(total, 0, tree)
            return Traffic(0, total, tree) if is_far else Traffic(rounds=tree)
        case "gather":
            return Traffic(0, far_bytes, 1) if is_root else Traffic(own * is_far, 0, 1)
        case "scatter":
            return Traffic(far_bytes, 0, 1) if is_root else Traffic(0, own * is_far, 1)
        case "reduce":
            part = total * len(far) // size
            if is_root:
                return Traffic(part, 2 * part, 2)
            return Traffic(part + total // size * is_far, part, 2)
    assert call.operation == "barrier", call.operation
    return Traffic(0, 0, tree)


def _hierarchical_traffic(call: Call, rank: int, size: int, local: int) -> Traffic:
    """Return the traffic of a call that crosses links once, with `local` ranks on each node."""
    node, local_rank = divmod(rank, local)
    nodes, last = size // local, size // local - 1
    piece = _piece_bytes(call, rank, size)
    slices = sum(_piece_bytes(call, other, size) for other in range(local_rank, size, local))
    if call.operation == "all_gather":
        return Traffic(last * piece, slices - piece, 1)
    width = 2 if call.dtype is not None and call.dtype.itemsize == 2 and call.reduction == "sum" else 1
    forward, before = width * slices * (node < last), width * slices * (node > 0)
    if call.operation == "all_reduce":
        return Traffic(forward + slices * (node > 0), before + slices * (node < last), last + last - node)
    assert call.operation == "reduce_scatter", call.operation
    back = slices - piece if node == last else 0
    return Traffic(forward + back, before + piece * (node < last), nodes - 1 + (node < last))


def _piece_bytes(call: Call, rank: int, size: int) -> int:
    """Return the bytes of a rank's piece."""
    if call.counts is None:
        return call.bytes // size
    assert call.memory is not None
    return call.counts[rank] * call.memory.itemsize
