"""Detection of ranks that compute longer than other ranks with the same work."""

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

WINDOW = 20
"""Number of steps after which the ranks compare their times."""


@dataclass(frozen=True)
class Straggler:
    """Slow rank.

    Attributes:
        rank: Number of the rank.
        node: Name of its node.
        seconds: Seconds of its computation in a step, without communication.
        times: These seconds over the median of ranks with the same work.
    """

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
    """Interface of a comparison of the ranks' times."""

    def step(self, seconds: float) -> list[Straggler] | None:
        """Add this rank's computing time of a step. Return the stragglers on rank 0 after each window."""


class StragglerDetector:
    """Compares the computing times of ranks after each window of `WINDOW` steps.

    Computing time is the time of a step without that of communication. The median of a rank's steps counts,
    so that single slow steps do not matter. Ranks with equal `work` are compared (see `work_of`). If the host
    does not wait for calls, as with NCCL, nothing is compared.
    """

    def __init__(self, mesh: Mesh, factor: float, work: object) -> None:
        """Exchange nodes and work of all ranks. Collective.

        Args:
            mesh: Mesh of the ranks.
            factor: Multiple of the median from which on a rank is a straggler; 0 for no comparison.
            work: Value of `work_of` for this rank.
        """
        self.world, self.factor = mesh.world, factor
        self.is_enabled = factor > 0 and mesh.world.size > 1 and TRANSPORTS[mesh.transport].on_host
        everyone = self.world.everyone
        self.nodes = everyone.all_gather_object(self.world.hostname) if self.is_enabled else []
        self.work = everyone.all_gather_object(work) if self.is_enabled else []
        self._seconds: list[float] = []
        self._has_warmed_up = False
        self._reported: set[int] = set()

    def step(self, seconds: float) -> list[Straggler] | None:
        """Add this rank's computing time of a step in seconds. Collective.

        The first step is left out, since it warms up.

        Returns:
            The stragglers on rank 0 at the end of a window, which also logs warnings of new ones; else None.
        """
        if not self.is_enabled:
            return None
        if self._has_warmed_up:
            self._seconds.append(seconds)
        self._has_warmed_up = True
        if len(self._seconds) < WINDOW:
            return None
        local_median = torch.tensor([median(self._seconds)], dtype=torch.float64)
        self._seconds.clear()
        times = self.world.everyone.gather(local_median)
        if times is None:
            return None
        slow = find_stragglers(times.tolist(), self.work, self.nodes, self.factor)
        self._reported = warn_of_new(slow, self._reported)
        return slow


def warn_of_new(slow: Sequence[Straggler], reported: set[int]) -> set[int]:
    """Log warnings of stragglers that were not reported before.

    Args:
        slow: All stragglers.
        reported: Ranks of earlier warnings.

    Returns:
        Ranks of all stragglers.
    """
    for straggler in slow:
        if straggler.rank not in reported:
            logging.getLogger("hpctrain").warning("%s", straggler.row()["words"])
    return {straggler.rank for straggler in slow}


def work_of(parts: Iterable[ModelPart]) -> object:
    """Return a small value that is equal for pipeline stages with the same work.

    It has the kind and the number of trained elements of each layer. So it is equal on all ranks of a stage,
    and on stages with the same layers.
    """
    return [
        (layer.kind, sum(prod(p.shard.shape) for p in layer.all_parameters if p.requires_grad))
        for part in parts
        for layer in part.layers
    ]


def find_stragglers(
    seconds: Sequence[float], work: Sequence[object], nodes: Sequence[str], factor: float
) -> list[Straggler]:
    """Return the ranks that need more than `factor` times the median of ranks with the same work.

    The slowest one comes first. A rank without others of the same work is never a straggler. The lower median
    is used, so that the slower of two ranks can be one.

    Args:
        seconds: Computing time of each rank.
        work: Work of each rank.
        nodes: Node of each rank.
        factor: Multiple of the median.
    """
    slow = []
    for rank, rank_seconds in enumerate(seconds):
        middle = median_low(other for other, same in zip(seconds, work, strict=True) if same == work[rank])
        if rank_seconds > factor * middle > 0:
            slow.append(Straggler(rank, nodes[rank], rank_seconds, rank_seconds / middle))
    return sorted(slow, key=lambda straggler: -straggler.times)
