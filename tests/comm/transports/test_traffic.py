"""Tests of the traffic of calls, compared with the messages of `pairwise_ranges` and with formulas."""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm.calls import Call
from hpctrain.comm.transports.traffic import Traffic, traffic_of
from hpctrain.comm.transports.transport import pairwise_ranges
from hpctrain.units import Link

SIZE = 4
UNEVEN = [3, 0, 5, 2]


def pieces(operation: str, rank: int, counts: list[int] | None) -> Call:
    """Return a call that moves pieces of fp32 with `counts` elements of each rank, or 6 elements."""
    own, every = (
        torch.zeros(6 if counts is None else counts[rank]),
        torch.zeros(6 * SIZE if counts is None else 10),
    )
    match operation:
        case "all_gather":
            return Call(operation, own, every, bytes=every.nbytes, counts=counts)
        case "gather":
            return Call(
                operation, own, every if rank == 1 else None, bytes=every.nbytes, counts=counts, root=1
            )
        case "scatter":
            given = every if rank == 1 else None
            return Call(operation, given, own, bytes=every.nbytes, counts=counts, root=1)
    received = None if counts is None else [counts[rank] for _ in range(SIZE)]
    output = torch.zeros(sum(received)) if received else every
    return Call("all_to_all", every, output, counts=counts, receive_counts=received)


@pytest.mark.parametrize("nodes", [[0, 1, 2, 3], [0, 0, 1, 1], [0, 1, 1, 0]])
@pytest.mark.parametrize("counts", [None, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("operation", ["all_gather", "gather", "scatter", "all_to_all"])
def test_pieces_pass_as_messages_of_each_pair_of_ranks(
    operation: str, counts: list[int] | None, nodes: list[int]
) -> None:
    traffic = {rank: traffic_of(pieces(operation, rank, counts), rank, SIZE, nodes) for rank in range(SIZE)}
    for rank, found in traffic.items():
        _, sends, _, receives = pairwise_ranges(pieces(operation, rank, counts), SIZE)
        out, into = (
            4 * sum(count for peer, (_, count) in enumerate(spans) if nodes[peer] != nodes[rank])
            for spans in (sends, receives)
        )
        assert found == Traffic(out, into, 1)
    assert sum(each.sent for each in traffic.values()) == sum(each.received for each in traffic.values()) > 0


def test_ranks_of_a_node_pass_no_link_to_each_other() -> None:
    tensor, nodes = torch.zeros(8), [0, 0, 1, 1]
    assert traffic_of(Call("all_reduce", tensor, tensor), 2, SIZE, nodes) == Traffic(32, 32, 2)
    assert traffic_of(Call("reduce_scatter", tensor, torch.zeros(2)), 2, SIZE, nodes) == Traffic(16, 16, 1)
    assert traffic_of(Call("all_reduce", tensor, tensor), 2, SIZE, [0, 0, 0, 0]) == Traffic()
    reduced = [traffic_of(Call("reduce", tensor, root=1), rank, SIZE, nodes) for rank in range(SIZE)]
    assert reduced == [Traffic(16, 16, 2), Traffic(16, 32, 2), Traffic(24, 16, 2), Traffic(24, 16, 2)]
    send, receive = Call("send", tensor, peer=1), Call("recv", None, tensor, peer=2)
    assert traffic_of(send, 0, SIZE, nodes) == traffic_of(receive, 3, SIZE, nodes) == Traffic()
    assert traffic_of(send, 2, SIZE, nodes) == Traffic(32, 0, 0)
    assert traffic_of(receive, 0, SIZE, nodes) == Traffic(0, 32, 1)


def test_hierarchical_traffic_goes_from_node_to_node_and_back() -> None:
    """Two ranks per node send half of the tensor each. Half types count as fp32 on the way forward."""
    nodes = [0, 0, 1, 1, 2, 2]

    def of_nodes(call: Call) -> list[Traffic]:
        return [traffic_of(call, rank, 6, nodes, crosses_links_once=True) for rank in (0, 2, 4)]

    whole, halves = torch.zeros(12), torch.zeros(12, dtype=torch.bfloat16)
    reduced = of_nodes(Call("all_reduce", whole, whole, reduction="sum"))
    assert reduced == [Traffic(24, 24, 4), Traffic(48, 48, 3), Traffic(24, 24, 2)]
    reduced = of_nodes(Call("all_reduce", halves, halves, reduction="sum"))
    assert reduced == [Traffic(24, 12, 4), Traffic(36, 36, 3), Traffic(12, 24, 2)]
    reduced = of_nodes(Call("all_reduce", halves, halves, reduction="max"))
    assert reduced == [Traffic(12, 12, 4), Traffic(24, 24, 3), Traffic(12, 12, 2)]
    scattered = of_nodes(Call("reduce_scatter", whole, whole[:2], reduction="sum"))
    assert scattered == [Traffic(24, 8, 3), Traffic(24, 32, 3), Traffic(16, 24, 2)]
    gathered = of_nodes(Call("all_gather", whole[:2], whole, bytes=48))
    assert gathered == [Traffic(16, 16, 1)] * 3


def test_reductions_go_to_the_owners_of_pieces_and_back() -> None:
    tensor = torch.zeros(8)
    assert traffic_of(Call("all_reduce", tensor, tensor), 2, SIZE) == Traffic(48, 48, 2)
    scattered = Call("reduce_scatter", tensor, torch.zeros(2))
    assert traffic_of(scattered, 2, SIZE) == Traffic(24, 24, 1)
    uneven = Call("reduce_scatter", tensor, torch.zeros(5), counts=[1, 1, 5, 1])
    assert traffic_of(uneven, 2, SIZE) == Traffic(12, 60, 1)
    reduced = [traffic_of(Call("reduce", tensor, root=1), rank, SIZE) for rank in range(SIZE)]
    assert reduced == [Traffic(32, 24, 2), Traffic(24, 48, 2), Traffic(32, 24, 2), Traffic(32, 24, 2)]


def test_messages_broadcasts_and_barriers() -> None:
    tensor = torch.zeros(8)
    assert traffic_of(Call("send", tensor, peer=1), 0, 2) == Traffic(32, 0, 0)
    assert traffic_of(Call("recv", None, tensor, peer=0), 1, 2) == Traffic(0, 32, 1)
    assert traffic_of(Call("broadcast", tensor, root=0), 0, 5) == Traffic(32, 0, 3)
    assert traffic_of(Call("broadcast", None, tensor, root=0), 3, 5) == Traffic(0, 32, 3)
    assert traffic_of(Call("barrier"), 0, SIZE) == Traffic(0, 0, 2)
    assert traffic_of(Call("all_reduce", tensor, tensor), 0, 1) == Traffic()


def test_bytes_pass_both_ways_at_once_and_rounds_wait() -> None:
    assert Traffic(200, 300, 2).seconds(Link(100.0, 0.25)) == 3.5
