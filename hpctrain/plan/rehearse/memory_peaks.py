"""Memory peaks of stages, and faults of stages that need more memory than there is."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpctrain.costs.part_bytes import PartBytes, part_bytes
from hpctrain.host.device import on_host
from hpctrain.pipeline.action import Action
from hpctrain.plan.activation_memory import activation_peak
from hpctrain.plan.memory_demand import MemoryDemand
from hpctrain.plan.memory_plan import MemoryPlan
from hpctrain.plan.plan_text import KINDS
from hpctrain.plan.rehearse.fault import RehearsalFault
from hpctrain.plan.rehearse.rank_programmes import RankProgrammes
from hpctrain.units import format_bytes


@dataclass(frozen=True)
class MemoryPeak:
    """Memory peak of a stage.

    Attributes:
        stage: Number of the stage.
        action: Action after which saved activations need most memory.
        total: Bytes of a rank at that time.
    """

    stage: int
    action: Action
    total: int


def find_peaks(programmes: RankProgrammes, memory: MemoryPlan) -> list[MemoryPeak]:
    """Return the memory peak of each stage, by its planned memory."""
    peaks = []
    for planned in memory.stages:
        stage = programmes.stage_of(planned.stage)
        parts = part_bytes(
            programmes.deck,
            stage.models,
            not on_host(programmes.device),
            programmes.deck.memory.recompute,
        )
        actions = programmes.schedule.stages[planned.stage]
        most = activation_peak(programmes.deck, parts, actions)

        def saved_bytes(
            count: int, actions: Sequence[Action] = actions, parts: Sequence[PartBytes] = parts
        ) -> int:
            return activation_peak(programmes.deck, parts, actions[:count])

        last = bisect_left(range(len(actions) + 1), most, key=saved_bytes)
        peaks.append(MemoryPeak(planned.stage, actions[max(0, last - 1)], planned.memory.total))
    return peaks


def memory_faults(
    memory: MemoryPlan, demand: MemoryDemand | None, peaks: Sequence[MemoryPeak]
) -> list[RehearsalFault]:
    """Return a fault for each stage whose ranks alone would exceed the memory of a node or GPU.

    If there is no such stage, because stages that share a node exceed it together, the fault names the stage
    that needs most.

    Args:
        memory: Planned memory.
        demand: Required and available memory; None if the limit is unknown.
        peaks: Memory peak of each stage.
    """
    if demand is None or demand.fits:
        return []
    over = [p for p in peaks if p.total * demand.ranks > demand.limit.bytes]
    over = over or [max(peaks, key=lambda peak: peak.total)]
    faults = []
    for peak in over:
        stage = memory.stages[peak.stage]
        kind, size = max(stage.memory.kinds().items(), key=lambda item: item[1])
        needed = replace(demand, needed=peak.total * demand.ranks)
        first = sum(memory.ranks_per_stage[: peak.stage])
        faults.append(
            RehearsalFault(
                "over memory",
                first,
                memory.ranks_per_stage[peak.stage],
                f"stage {peak.stage}, from rank {first}: the peak is {format_bytes(peak.total)} per rank at "
                f"{peak.action}, of which {format_bytes(size)} are {KINDS[kind]}; {needed} "
                f"({format_bytes(demand.limit.bytes // demand.ranks)} per rank would fit)",
            )
        )
    return faults
