"""Which nodes are slow beside others and beside what they were, and how it is said."""

from __future__ import annotations

import pytest

from hpctrain.watch.stress.nodes import (
    EarlierRates,
    Node,
    degraded_nodes,
    nodes_of,
    rate_text,
    rows_of,
    slow_nodes,
)


def node(name: str, rates: dict[str, float], ranks: int = 1, device: str = "EPYC") -> Node:
    return Node(
        name, device, tuple(range(ranks)), {each: dict.fromkeys(range(ranks), rates[each]) for each in rates}
    )


def kept(day: int, rate: float, name: str = "n3", ranks: int = 1) -> EarlierRates:
    return EarlierRates(name, "EPYC", ranks, f"2026-11-{day:02d}", {"fp32 products": rate})


def test_a_node_below_the_median_is_slow() -> None:
    nodes = [node(f"n{number}", {"fp32 products": 100e9 - number * 1e9}) for number in range(4)]
    assert list(slow_nodes(nodes)) == []
    nodes.append(node("n4", {"fp32 products": 61e9}))
    (finding,) = slow_nodes(nodes)
    assert finding.statement == (
        "node n4 multiplies in fp32 at 61 GFLOP/s per rank, 38% less than the median of 5 such nodes "
        "(98 GFLOP/s)"
    )
    assert "--exclude=n4" in finding.remedy
    assert not finding.fatal


@pytest.mark.parametrize(("rate", "slow"), [(86.0, 0), (84.0, 1)])
def test_fifteen_percent_make_a_slow_node_of_two(rate: float, slow: int) -> None:
    nodes = [node("n0", {"memory": 100.0}), node("n1", {"memory": rate})]
    assert len(list(slow_nodes(nodes))) == slow


def test_only_nodes_of_one_kind_are_compared() -> None:
    others = [
        node("n1", {"memory": 10.0}, device="Xeon"),
        node("n2", {"memory": 10.0}, ranks=2),
        node("n3", {}),
    ]
    assert list(slow_nodes([node("n0", {"memory": 100.0}), *others])) == []


def test_a_slow_rank_is_named_beside_its_node() -> None:
    one = Node("n0", "H100", (4, 5, 6), {"bf16 products": {4: 600e12, 5: 610e12, 6: 400e12}})
    (finding,) = slow_nodes([one])
    assert finding.statement == (
        "rank 6 on n0 multiplies in bf16 at 400 TFLOP/s per rank, 33% less than the median of the node's "
        "ranks (600 TFLOP/s)"
    )


def test_a_node_that_became_slow_shows() -> None:
    now = [node("n3", {"fp32 products": 61e9})]
    (finding,) = degraded_nodes(now, [kept(2, 92e9), kept(1, 20e9, "n2"), kept(1, 20e9, ranks=2)])
    assert finding.statement == (
        "node n3 multiplies in fp32 at 61 GFLOP/s per rank, 34% less than on 2026-11-02 (92 GFLOP/s)"
    )
    assert list(degraded_nodes(now, [kept(2, 70e9)])) == []
    # One that has been slow for long still shows; a single quick day of many does not count.
    assert "2026-11-02" in next(degraded_nodes(now, [kept(2, 92e9), kept(3, 61e9)])).statement
    assert list(degraded_nodes(now, [kept(2, 92e9), *(kept(day, 62e9) for day in range(3, 8))])) == []


def test_rates_are_medians_of_ranks_and_rounds() -> None:
    rounds = [[{"memory": 10e9}, {"memory": 4e9}, {"memory": 1e6}], [{"memory": 12e9}, {}, {"memory": 1e6}]]
    nodes = nodes_of(["a", "a", "b"], ["EPYC"] * 3, rounds)
    assert [each.ranks for each in nodes] == [(0, 1), (2,)]
    assert nodes[0].rates == {"memory": 7.5e9}
    assert rows_of(nodes) == [["node", "ranks", "memory"], ["a", "0-1", "7.5 (4) GB/s"], ["b", "2", "1 MB/s"]]
    assert rate_text("fp32 products", 999.96e9) == "1 TFLOP/s"
