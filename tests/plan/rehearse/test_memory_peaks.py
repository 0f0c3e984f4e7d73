"""Stages over memory, and when they hold most.

Tests of plan/rehearse/rehearsal.py too.
"""

from __future__ import annotations

from dataclasses import replace

from hpctrain.host.memory import MemoryLimit
from hpctrain.pipeline.action import live_activations
from hpctrain.plan.memory_demand import MemoryDemand
from hpctrain.plan.memory_plan import plan_memory
from hpctrain.plan.rehearse.memory_peaks import find_peaks, memory_faults
from hpctrain.plan.rehearse.rank_programmes import RankProgrammes
from tests.engines import small_deck

KEYS = ("layout.pipeline=4", "model.layers=4", "batch.micro_size=1")


def test_a_stage_over_memory_is_found_and_named() -> None:
    deck = small_deck(*KEYS)
    memory = plan_memory(deck, 8, 61, ranks_per_node=2)
    programmes = RankProgrammes(deck, 8, 61, 2)
    peaks = find_peaks(programmes, memory)
    # A stage holds most where most micro-batches are alive.
    for peak, actions in zip(peaks, programmes.schedule.stages, strict=True):
        alive = list(live_activations(actions))
        before = max(0, actions.index(peak.action) - 1)
        assert max(alive) in alive[before : actions.index(peak.action) + 1]
    most = memory.largest.memory.total
    demand = MemoryDemand("a node", 2, 2 * most, MemoryLimit("node", 2 * most, "of memory"))
    assert memory_faults(memory, demand, peaks) == []
    planted = memory.stages[2]
    planted = replace(planted, memory=replace(planted.memory, activation=planted.memory.activation + most))
    stages = (*memory.stages[:2], planted, memory.stages[3])
    larger = replace(memory, stages=stages)
    demand = replace(demand, needed=2 * planted.memory.total)
    (fault,) = memory_faults(larger, demand, find_peaks(programmes, larger))
    assert (fault.kind, fault.rank, fault.count) == ("over memory", 4, 2)
    assert fault.sentence.startswith("stage 2, from rank 4: the peak is ")
    assert f" per rank at {peaks[2].action}, " in fault.sentence and "activations" in fault.sentence
    assert memory_faults(larger, None, peaks) == []
