"""Whether a stage holds more than there is at any time of a step, and when it holds most."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpctrain.costs.part_bytes import PartBytes, part_bytes
from hpctrain.host.device import on_host
from hpctrain.pipeline.action import Action
from hpctrain.plan.activations import activation_peak
from hpctrain.plan.memory import MemoryPlan
from hpctrain.plan.rehearse.fault import RehearsalFault
from hpctrain.plan.rehearse.ranks import RankProgrammes
from hpctrain.plan.room import Room
from hpctrain.plan.words import KINDS
from hpctrain.units import format_bytes


@dataclass(frozen=True)
class MemoryPeak:
    """The action after which a stage's forwards save most, and bytes of a rank then, in all."""

    stage: int
    action: Action
    total: int


def find_peaks(programmes: RankProgrammes, memory: MemoryPlan) -> list[MemoryPeak]:
    """When each stage holds most, as its memory was planned."""
    found = []
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

        def held(count: int, actions: Sequence[Action] = actions, parts: Sequence[PartBytes] = parts) -> int:
            return activation_peak(programmes.deck, parts, actions[:count])

        last = bisect_left(range(len(actions) + 1), most, key=held)
        found.append(MemoryPeak(planned.stage, actions[max(0, last - 1)], planned.memory.total))
    return found


def over_memory(memory: MemoryPlan, room: Room | None, peaks: Sequence[MemoryPeak]) -> list[RehearsalFault]:
    """A fault of each stage whose ranks need more than a node, or a GPU, has where all there are of it; of
    the one that holds most where only stages that share a node do.
    """
    if room is None or room.fits:
        return []
    over = [p for p in peaks if p.total * room.ranks > room.limit.bytes]
    over = over or [max(peaks, key=lambda peak: peak.total)]
    faults = []
    for peak in over:
        stage = memory.stages[peak.stage]
        kind, size = max(stage.memory.kinds().items(), key=lambda item: item[1])
        needed = replace(room, needed=peak.total * room.ranks)
        first = sum(memory.ranks[: peak.stage])
        faults.append(
            RehearsalFault(
                "over memory",
                first,
                memory.ranks[peak.stage],
                f"stage {peak.stage}, from rank {first}: the peak is {format_bytes(peak.total)} per rank at "
                f"{peak.action}, of which {format_bytes(size)} are {KINDS[kind]}; {needed} "
                f"({format_bytes(room.limit.bytes // room.ranks)} per rank would fit)",
            )
        )
    return faults
