"""Ranks whose own computing takes longer than that of the others who do the same."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median, median_low
from typing import Any, Protocol

import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.transports.choose import TRANSPORTS
from hpctrain.model.part import ModelPart
from hpctrain.units import format_seconds

WINDOW = 20  # steps after which the ranks compare their times


@dataclass(frozen=True)
class Straggler:
    """A slow rank: seconds of its own computing in a step, and how many times the others' median it is."""

    rank: int
    node: str
    seconds: float
    times: float

    def row(self) -> dict[str, Any]:
        """Return the entry for `status.json`."""
        words = (
            f"rank {self.rank} on {self.node} computes for {format_seconds(self.seconds)} a step, "
            f"{self.times:.2g} times the median of those with the same work"
        )
        return {"rank": self.rank, "node": self.node, "times": round(self.times, 3), "words": words}


class TimeComparison(Protocol):
    """What compares the ranks' times."""

    def step(self, seconds: float) -> list[Straggler] | None:
        """Add this rank's computing time of a step; on rank 0 the stragglers at the end of a window."""


class StragglerDetector:
    """Compares the ranks' times once a window of steps: the step's less those inside communication.

    Of each rank the median of its steps counts, so that a single slow step is none. Compared are ranks whose
    `work` is equal, see `work_of`. Where the host does not wait for a call, as over NCCL, its times tell
    nothing, and nothing is compared.
    """

    def __init__(self, mesh: Mesh, factor: float, work: object) -> None:
        """Named are ranks above `factor` times the median; 0: never. Collective."""
        self.world, self.factor = mesh.world, factor
        self.on = factor > 0 and mesh.world.size > 1 and TRANSPORTS[mesh.transport].on_host
        everyone = self.world.everyone
        self.nodes = everyone.all_gather_object(self.world.hostname) if self.on else []
        self.work = everyone.all_gather_object(work) if self.on else []
        self._seconds: list[float] = []
        self._warm = False
        self._named: set[int] = set()

    def step(self, seconds: float) -> list[Straggler] | None:
        """Add this rank's computing time of a step, in seconds; the first one, which warms up, is left out.

        At the end of a window, the stragglers on rank 0, which also warns of new ones; else None.
        Collective.
        """
        if not self.on:
            return None
        if self._warm:
            self._seconds.append(seconds)
        self._warm = True
        if len(self._seconds) < WINDOW:
            return None
        mine = torch.tensor([median(self._seconds)], dtype=torch.float64)
        self._seconds.clear()
        times = self.world.everyone.gather(mine)
        if times is None:
            return None
        slow = find_stragglers(times.tolist(), self.work, self.nodes, self.factor)
        self._named = warn_of(slow, self._named)
        return slow


def warn_of(slow: Sequence[Straggler], named: set[int]) -> set[int]:
    """Warn of those that were not `named` before; the ranks of all."""
    for straggler in slow:
        if straggler.rank not in named:
            logging.getLogger("hpctrain").warning("%s", straggler.row()["words"])
    return {straggler.rank for straggler in slow}


def work_of(parts: Iterable[ModelPart]) -> object:
    """What a pipeline stage of these parts computes, a small value: layers of one kind take as long, if as
    much of them is trained. It is equal on the ranks of a stage, and on stages of the same layers.
    """
    return [
        (layer.kind, sum(prod(p.shard.shape) for p in layer.all_parameters if p.requires_grad))
        for part in parts
        for layer in part.layers
    ]


def find_stragglers(
    seconds: Sequence[float], work: Sequence[object], nodes: Sequence[str], factor: float
) -> list[Straggler]:
    """The ranks whose seconds are above `factor` times the median of those with the same work, slowest first.

    A rank that has its work alone is none. Of an even number, the lower of the two in the middle is the
    median, so that of two ranks the slower one can stand out.
    """
    slow = []
    for rank, own in enumerate(seconds):
        usual = median_low(other for other, same in zip(seconds, work, strict=True) if same == work[rank])
        if own > factor * usual > 0:
            slow.append(Straggler(rank, nodes[rank], own, own / usual))
    return sorted(slow, key=lambda straggler: -straggler.times)
