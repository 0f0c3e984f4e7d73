"""What a call moves over a rank's link to other ranks: bytes out, bytes in, and rounds of messages.

The ledger counts payload, which does not depend on how many ranks there are; this is what passes a link by
the algorithms of `reduction`: pieces go straight to their owners. Of S bytes among N ranks, out and in alike
where nothing else is said:

    all_reduce               2 S (N-1)/N   2 rounds: parts to the owners of pieces, then sums to the others
    reduce_scatter           S (N-1)/N     1 round
    all_gather, all_to_all   S (N-1)/N     1 round; of uneven pieces without the rank's own
    broadcast                S             log2 N rounds: out at the root, in elsewhere; passed on meanwhile
    gather, scatter          S (N-1)/N     1 round: at the root; the other ranks' own piece the other way
    reduce                   2 S (N-1)/N   2 rounds: in at the root; from the others S goes out
    send, recv               S             out, and nobody waits; in, 1 round
    barrier                  nothing       log2 N rounds
"""

from __future__ import annotations

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


def traffic_of(call: Call, rank: int, size: int) -> Traffic:
    """That of this rank's part in a call among `size` ranks, whose tensors are still there."""
    if size == 1 and call.peer < 0:
        return Traffic()
    whole, own, tree = call.bytes, _own_bytes(call, rank, size), (size - 1).bit_length()
    others = whole - own
    root = call.root == rank
    match call.operation:
        case "all_reduce":
            both = 2 * whole * (size - 1) // size
            return Traffic(both, both, 2)
        case "reduce_scatter":
            return Traffic(others, (size - 1) * own, 1)
        case "all_gather":
            return Traffic((size - 1) * own, others, 1)
        case "all_to_all":
            assert call.output is not None
            received = call.output.nbytes * (size - 1) // size
            if call.received is not None:
                received = call.output.nbytes - call.received[rank] * call.output.itemsize
            return Traffic(others, received, 1)
        case "broadcast":
            return Traffic(whole, 0, tree) if root else Traffic(0, whole, tree)
        case "gather":
            return Traffic(0, others, 1) if root else Traffic(own, 0, 1)
        case "scatter":
            return Traffic(others, 0, 1) if root else Traffic(0, own, 1)
        case "reduce":
            part = whole * (size - 1) // size
            return Traffic(part, 2 * part, 2) if root else Traffic(whole, part, 2)
        case "send":
            return Traffic(whole, 0, 0)
        case "recv":
            return Traffic(0, whole, 1)
    assert call.operation == "barrier", call.operation
    return Traffic(0, 0, tree)


def _own_bytes(call: Call, rank: int, size: int) -> int:
    """Bytes of this rank's own piece of the whole."""
    if call.counts is None:
        return call.bytes // size
    assert call.memory is not None
    return call.counts[rank] * call.memory.itemsize
