"""The rates of nodes: side by side, and which are slow beside the others or beside what they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median, median_high
from typing import NamedTuple

from hpctrain.host.doctor import DoctorFinding
from hpctrain.text import ranges

SLOW = 0.85
"""Of the median of the nodes, below which products and memory are slow: healthy ones differ by less."""

SLOW_RANK = 0.75
"""Of its node's median, below which a rank's products or memory are slow."""


class Measure(NamedTuple):
    """A rate's unit, from which share of the usual on it is slow, and what a node does at this rate."""

    unit: str
    slow: float
    does: str


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
"""By name. What links and disks do depends on what others send and write at the same time."""

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Node:
    """A node: what kind of device its ranks compute on, which ranks these are, and by name their rates, of
    each rank the median of all rounds.
    """

    name: str
    device: str
    ranks: tuple[int, ...]
    of_ranks: Mapping[str, Mapping[int, float]]

    @property
    def rates(self) -> dict[str, float]:
        """By name the median of its ranks."""
        return {name: median(some.values()) for name, some in self.of_ranks.items() if some}


@dataclass(frozen=True)
class EarlierRates:
    """What was measured of a node earlier, by so many ranks, on a day such as "2026-11-02"."""

    name: str
    device: str
    ranks: int
    day: str
    rates: Mapping[str, float]


def nodes_of(
    hosts: Sequence[str], devices: Sequence[str], rounds: Sequence[Sequence[Mapping[str, float]]]
) -> list[Node]:
    """The nodes, by their ranks' names, devices, and rates of each round."""
    nodes = []
    for host in dict.fromkeys(hosts):
        ranks = tuple(rank for rank, name in enumerate(hosts) if name == host)
        of_ranks: dict[str, dict[int, float]] = {}
        for name in MEASURES:
            for rank in ranks:
                values = [each[rank][name] for each in rounds if name in each[rank]]
                if values:
                    of_ranks.setdefault(name, {})[rank] = median(values)
        nodes.append(Node(host, devices[ranks[0]], ranks, of_ranks))
    return nodes


def rows_of(nodes: Sequence[Node]) -> list[list[str]]:
    """A head and a row a node, with the rate of its slowest rank in brackets where it has several."""
    names = [name for name in MEASURES if any(name in node.rates for node in nodes)]
    rows = [["node", "ranks", *names]]
    for node in nodes:
        cells = [_cell(name, node) for name in names]
        rows.append([node.name, ranges(node.ranks, ","), *cells])
    return rows


def slow_nodes(nodes: Sequence[Node]) -> Iterator[DoctorFinding]:
    """Those whose rate is far below the median of the nodes with such devices and as many ranks; then ranks
    far below their node.
    """
    for name, measure in MEASURES.items():
        for node in nodes:
            alike = [other.rates[name] for other in nodes if _alike(node, other) and name in other.rates]
            usual = median_high(alike) if alike else 0.0
            if name in node.rates and node.rates[name] < measure.slow * usual:
                beside = f"the median of {len(alike)} such nodes ({rate_text(name, usual)})"
                yield _slow(node, name, node.rates[name], usual, beside)
    for name in ("fp32 products", "bf16 products", "memory"):
        for node in nodes:
            usual = node.rates.get(name, 0.0)
            for rank, rate in node.of_ranks.get(name, {}).items():
                if rate < SLOW_RANK * usual:
                    beside = f"the median of the node's ranks ({rate_text(name, usual)})"
                    yield _slow(node, name, rate, usual, beside, f"rank {rank} on {node.name}")


def fallen_nodes(nodes: Iterable[Node], kept: Sequence[EarlierRates]) -> Iterator[DoctorFinding]:
    """Those whose rate is far below what it used to be: three quarters of what is kept of it were lower."""
    for node in nodes:
        earlier = [
            each
            for each in kept
            if (each.name, each.device, each.ranks) == (node.name, node.device, len(node.ranks))
        ]
        for name, rate in node.rates.items():
            known = sorted(
                (each for each in earlier if name in each.rates), key=lambda each: each.rates[name]
            )
            if not known:
                continue
            usual = known[ceil(0.75 * (len(known) - 1))]
            if rate < MEASURES[name].slow * usual.rates[name]:
                beside = f"on {usual.day} ({rate_text(name, usual.rates[name])})"
                yield _slow(node, name, rate, usual.rates[name], beside)


def rate_text(name: str, rate: float) -> str:
    """`61.2 GFLOP/s`."""
    size, prefix = _scale(rate)
    return f"{rate / size:.3g} {prefix}{MEASURES[name].unit}"


def _slow(node: Node, name: str, rate: float, usual: float, beside: str, who: str = "") -> DoctorFinding:
    measure = MEASURES[name]
    less = f"{100 * (1 - rate / usual):.0f}% less than {beside}"
    told = f"{who or f'node {node.name}'} {measure.does} at {rate_text(name, rate)} per rank, {less}"
    remedy = f"check {node.name} for other processes, clocks, cooling and errors"
    return DoctorFinding("slow", told, f"{remedy}; {leaving_out([node.name])}")


def leaving_out(hosts: Iterable[str]) -> str:
    """How runs are started without some nodes."""
    names = ",".join(sorted(set(hosts)))
    return f"exclude it until it is repaired (srun or sbatch --exclude={names})"


def _alike(node: Node, other: Node) -> bool:
    return (node.device, len(node.ranks)) == (other.device, len(other.ranks))


def _cell(name: str, node: Node) -> str:
    if name not in node.rates:
        return ""
    size, prefix = _scale(node.rates[name])
    several = f" ({min(node.of_ranks[name].values()) / size:.3g})" if len(node.of_ranks[name]) > 1 else ""
    return f"{node.rates[name] / size:.3g}{several} {prefix}{MEASURES[name].unit}"


def _scale(rate: float) -> tuple[float, str]:
    return next(((size, prefix) for size, prefix in _PREFIXES if rate >= 0.9995 * size), (1.0, ""))
