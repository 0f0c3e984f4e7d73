"""What a call moves over a rank's link to other nodes: bytes out, bytes in, and rounds of messages.

The ledger counts payload, which does not depend on how many ranks there are; this is what passes a link by
the algorithms of `reduction`: pieces go straight to their owners. Of S bytes among N ranks on nodes of their
own, out and in alike where nothing else is said:

    all_reduce               2 S (N-1)/N   2 rounds: parts to the owners of pieces, then sums to the others
    reduce_scatter           S (N-1)/N     1 round
    all_gather, all_to_all   S (N-1)/N     1 round; of uneven pieces without the rank's own
    broadcast                S             log2 N rounds: out at the root, in elsewhere; passed on meanwhile
    gather, scatter          S (N-1)/N     1 round: at the root; the other ranks' own piece the other way
    reduce                   2 S (N-1)/N   2 rounds: in at the root; from the others S goes out
    send, recv               S             out, and nobody waits; in, 1 round
    barrier                  nothing       log2 N rounds

Of ranks that share nodes, what goes to others of the node is not counted. Where each byte crosses links but
once (`hierarchical`), a rank of N nodes with L ranks each has, halves in sums counted as fp32 on their way:

    all_reduce       S/L out to the next node, but from the last; as much back, but from the first; N-1 rounds
                     there, and one for each node on the way back
    reduce_scatter   S/L out to the next node; from the last one S/L (N-1)/N to the others; N-1 rounds, 1 back
    all_gather       S/L (N-1)/N   1 round
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpctrain.comm.calls import Call
from hpctrain.units import Link


class Traffic(NamedTuple):
    """Bytes that a rank sends to others and receives from them; rounds of messages, each after the other."""

    sent: int = 0
    received: int = 0
    rounds: int = 0

    def seconds(self, link: Link) -> float:
        """Over a link that is free, both ways at once."""
        return max(self.sent, self.received) / link.bytes_per_second + self.rounds * link.latency


def traffic_of(
    call: Call, rank: int, size: int, nodes: Sequence[int] | None = None, once: bool = False
) -> Traffic:
    """That of this rank's part in a call among `size` ranks, whose tensors are still there.

    `nodes` are those of the ranks, None where each has its own; with `once` each byte crosses links once.
    """
    nodes = range(size) if nodes is None else nodes
    if call.peer >= 0:
        if nodes[call.peer] == nodes[rank]:
            return Traffic()
        return Traffic(call.bytes, 0, 0) if call.operation == "send" else Traffic(0, call.bytes, 1)
    far = [other for other in range(size) if nodes[other] != nodes[rank]]
    if not far:
        return Traffic()
    if once:
        return _once(call, rank, size, size // len(set(nodes)))
    whole, own, tree = call.bytes, _bytes_of(call, rank, size), (size - 1).bit_length()
    theirs = sum(_bytes_of(call, other, size) for other in far) if call.counts else whole * len(far) // size
    root = call.root == rank
    across = call.root < 0 or nodes[call.root] != nodes[rank]
    match call.operation:
        case "all_reduce":
            both = 2 * whole * len(far) // size
            return Traffic(both, both, 2)
        case "reduce_scatter":
            return Traffic(theirs, len(far) * own, 1)
        case "all_gather":
            return Traffic(len(far) * own, theirs, 1)
        case "all_to_all":
            assert call.output is not None
            received = call.output.nbytes * len(far) // size
            if call.received is not None:
                received = sum(call.received[other] for other in far) * call.output.itemsize
            return Traffic(theirs, received, 1)
        case "broadcast":
            if root:
                return Traffic(whole, 0, tree)
            return Traffic(0, whole, tree) if across else Traffic(rounds=tree)
        case "gather":
            return Traffic(0, theirs, 1) if root else Traffic(own * across, 0, 1)
        case "scatter":
            return Traffic(theirs, 0, 1) if root else Traffic(0, own * across, 1)
        case "reduce":
            part = whole * len(far) // size
            return Traffic(part, 2 * part, 2) if root else Traffic(part + whole // size * across, part, 2)
    assert call.operation == "barrier", call.operation
    return Traffic(0, 0, tree)


def _once(call: Call, rank: int, size: int, local: int) -> Traffic:
    """Of ranks that lie `local` by `local` on nodes, see `hierarchical`."""
    node, place = divmod(rank, local)
    nodes, last = size // local, size // local - 1
    own = _bytes_of(call, rank, size)
    slices = sum(_bytes_of(call, other, size) for other in range(place, size, local))
    if call.operation == "all_gather":
        return Traffic(last * own, slices - own, 1)
    fine = 2 if call.dtype is not None and call.dtype.itemsize == 2 and call.reduced == "sum" else 1
    there, before = fine * slices * (node < last), fine * slices * (node > 0)
    if call.operation == "all_reduce":
        return Traffic(there + slices * (node > 0), before + slices * (node < last), last + last - node)
    assert call.operation == "reduce_scatter", call.operation
    back = slices - own if node == last else 0
    return Traffic(there + back, before + own * (node < last), nodes - 1 + (node < last))


def _bytes_of(call: Call, rank: int, size: int) -> int:
    """Bytes of a rank's piece of the whole."""
    if call.counts is None:
        return call.bytes // size
    assert call.memory is not None
    return call.counts[rank] * call.memory.itemsize
