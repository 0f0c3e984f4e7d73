"""Rates of nodes: a table, and nodes that are slow compared with others or with earlier tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median, median_high
from typing import NamedTuple

from hpctrain.host.doctor import DoctorFinding
from hpctrain.text import ranges

SLOW = 0.85
"""Share of the nodes' median below which products and memory are slow. Healthy nodes differ by less."""

SLOW_RANK = 0.75
"""Share of its node's median below which products or memory of a rank are slow."""


class Measure(NamedTuple):
    """Description of a rate.

    Attributes:
        unit: Its unit.
        slow: Share of the usual rate below which it is slow; 0 if it is never slow.
        activity: What a node does at this rate, for messages.
    """

    unit: str
    slow: float
    activity: str


MEASURES: Mapping[str, Measure] = {
    "fp32 products": Measure("FLOP/s", SLOW, "multiplies in fp32"),
    "bf16 products": Measure("FLOP/s", SLOW, "multiplies in bf16"),
    "memory": Measure("B/s", SLOW, "reads its memory"),
    "inside the node": Measure("B/s", 0.7, "sends between its ranks"),
    "between nodes": Measure("B/s", 0.7, "sends to other nodes"),
    "all ranks": Measure("B/s", 0.0, "sends among all ranks"),
    "disk write": Measure("B/s", 0.5, "writes to its disk"),
    "disk read": Measure("B/s", 0.5, "reads from its disk"),
}
"""Measures by name. Rates of links and disks vary more, since other jobs use them at the same time."""

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Node:
    """Tested node.

    Attributes:
        name: Name of the node.
        device: Name of the devices of its ranks.
        ranks: Its ranks.
        rank_rates: Rates by name of the measure and by rank: medians of all rounds.
    """

    name: str
    device: str
    ranks: tuple[int, ...]
    rank_rates: Mapping[str, Mapping[int, float]]

    @property
    def rates(self) -> dict[str, float]:
        """Median of the ranks' rates, by name of the measure."""
        return {name: median(some.values()) for name, some in self.rank_rates.items() if some}


@dataclass(frozen=True)
class EarlierRates:
    """Rates of an earlier test of a node.

    Attributes:
        name: Name of the node.
        device: Name of the devices of its ranks.
        ranks: Number of its ranks.
        day: Date of the test, such as "2026-11-02".
        rates: Rates by name of the measure.
    """

    name: str
    device: str
    ranks: int
    day: str
    rates: Mapping[str, float]


def nodes_of(
    hosts: Sequence[str], devices: Sequence[str], rounds: Sequence[Sequence[Mapping[str, float]]]
) -> list[Node]:
    """Return the nodes with their rates.

    Args:
        hosts: Name of each rank's node.
        devices: Name of each rank's device.
        rounds: For each round, the rates of each rank.
    """
    nodes = []
    for host in dict.fromkeys(hosts):
        ranks = tuple(rank for rank, name in enumerate(hosts) if name == host)
        rank_rates: dict[str, dict[int, float]] = {}
        for name in MEASURES:
            for rank in ranks:
                values = [each[rank][name] for each in rounds if name in each[rank]]
                if values:
                    rank_rates.setdefault(name, {})[rank] = median(values)
        nodes.append(Node(host, devices[ranks[0]], ranks, rank_rates))
    return nodes


def rows_of(nodes: Sequence[Node]) -> list[list[str]]:
    """Return a table of nodes, with the rate of the slowest rank in parentheses if a node has several."""
    names = [name for name in MEASURES if any(name in node.rates for node in nodes)]
    rows = [["node", "ranks", *names]]
    for node in nodes:
        cells = [_cell(name, node) for name in names]
        rows.append([node.name, ranges(node.ranks, ","), *cells])
    return rows


def slow_nodes(nodes: Sequence[Node]) -> Iterator[DoctorFinding]:
    """Yield findings on nodes with slow rates, then on ranks that are slower than their node.

    A node is compared with the median of nodes with equal devices and as many ranks.
    """
    for name, measure in MEASURES.items():
        for node in nodes:
            comparable = [
                other.rates[name] for other in nodes if _is_comparable(node, other) and name in other.rates
            ]
            expected = median_high(comparable) if comparable else 0.0
            if name in node.rates and node.rates[name] < measure.slow * expected:
                reference = f"the median of {len(comparable)} such nodes ({rate_text(name, expected)})"
                yield _slow(node, name, node.rates[name], expected, reference)
    for name in ("fp32 products", "bf16 products", "memory"):
        for node in nodes:
            expected = node.rates.get(name, 0.0)
            for rank, rate in node.rank_rates.get(name, {}).items():
                if rate < SLOW_RANK * expected:
                    reference = f"the median of the node's ranks ({rate_text(name, expected)})"
                    yield _slow(node, name, rate, expected, reference, f"rank {rank} on {node.name}")


def degraded_nodes(nodes: Iterable[Node], earlier_rates: Sequence[EarlierRates]) -> Iterator[DoctorFinding]:
    """Yield findings on nodes that are much slower than in earlier tests, whose upper quartile counts."""
    for node in nodes:
        earlier = [
            each
            for each in earlier_rates
            if (each.name, each.device, each.ranks) == (node.name, node.device, len(node.ranks))
        ]
        for name, rate in node.rates.items():
            known = sorted(
                (each for each in earlier if name in each.rates), key=lambda each: each.rates[name]
            )
            if not known:
                continue
            expected = known[ceil(0.75 * (len(known) - 1))]
            if rate < MEASURES[name].slow * expected.rates[name]:
                reference = f"on {expected.day} ({rate_text(name, expected.rates[name])})"
                yield _slow(node, name, rate, expected.rates[name], reference)


def rate_text(name: str, rate: float) -> str:
    """Return a rate as a text such as `61.2 GFLOP/s`."""
    size, prefix = _scale(rate)
    return f"{rate / size:.3g} {prefix}{MEASURES[name].unit}"


def _slow(
    node: Node, name: str, rate: float, expected: float, reference: str, who: str = ""
) -> DoctorFinding:
    measure = MEASURES[name]
    less = f"{100 * (1 - rate / expected):.0f}% less than {reference}"
    text = f"{who or f'node {node.name}'} {measure.activity} at {rate_text(name, rate)} per rank, {less}"
    remedy = f"check {node.name} for other processes, clocks, cooling and errors"
    return DoctorFinding("slow", text, f"{remedy}; {exclusion_advice([node.name])}")


def exclusion_advice(hosts: Iterable[str]) -> str:
    """Return how to start runs without some nodes, for messages."""
    names = ",".join(sorted(set(hosts)))
    return f"exclude it until it is repaired (srun or sbatch --exclude={names})"


def _is_comparable(node: Node, other: Node) -> bool:
    return (node.device, len(node.ranks)) == (other.device, len(other.ranks))


def _cell(name: str, node: Node) -> str:
    if name not in node.rates:
        return ""
    size, prefix = _scale(node.rates[name])
    several = f" ({min(node.rank_rates[name].values()) / size:.3g})" if len(node.rank_rates[name]) > 1 else ""
    return f"{node.rates[name] / size:.3g}{several} {prefix}{MEASURES[name].unit}"


def _scale(rate: float) -> tuple[float, str]:
    return next(((size, prefix) for size, prefix in _PREFIXES if rate >= 0.9995 * size), (1.0, ""))
