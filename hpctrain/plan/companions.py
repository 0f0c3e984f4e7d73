"""The memory of a whole run: of the model that it trains, and of what a policy has beside it.

A critic is trained as the policy is, in its own layout; a reference and a copy that writes are parameters
alone. Each may have ranks of its own. Models beside each other compute in turn: what serves a step in passing
is there once, for the one that needs most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.checkpoint.evaluation_deck import evaluation_deck
from hpctrain.checkpoint.names import present_checkpoints
from hpctrain.checkpoint.read import read_state
from hpctrain.comm.planned import PlannedMesh
from hpctrain.costs.bucket_bytes import pool_bytes, value_bytes
from hpctrain.costs.cache_plan import CachePlan
from hpctrain.costs.layer_bytes.linear_bytes import planned_converted_bytes
from hpctrain.costs.memory_account import MemoryAccount
from hpctrain.deck.auxiliary_decks import (
    COPY,
    concurrent_texts,
    critic_deck,
    generates_itself,
    is_checkpoint,
    reference_deck,
)
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.objective import POLICY_KINDS
from hpctrain.deck.sections.rank_partition import CRITIC, POLICY, REFERENCE, REWARD, RankPartition
from hpctrain.engine.generation import plan_generation_stage
from hpctrain.engine.layout.layer_placement import place_by_flops
from hpctrain.engine.mesh_sizes import axis_sizes, micro_batches
from hpctrain.engine.stages.inference_stage import build_inference_stage
from hpctrain.engine.stages.planned_stage import PipelinePosition, plan_stage
from hpctrain.engine.stages.stage import Stage
from hpctrain.errors import HpctrainError
from hpctrain.host.device import device_kind, on_host
from hpctrain.model.construction import architecture_of
from hpctrain.pipeline.action import Schedule
from hpctrain.plan.gpu_overhead import CONTEXT_BYTES
from hpctrain.plan.memory import MemoryPlan, StageMemory, plan_memory
from hpctrain.plan.step_on_meta import rehearse_forward

REWARD_MODELS = "reward model"


@dataclass(frozen=True)
class _Beside:
    """What another model holds on the ranks of each of its pipeline's stages, in their order."""

    name: str
    stages: Sequence[StageMemory]

    def of_stage(self, number: int, count: int) -> StageMemory:
        """The most on ranks of that one of `count` stages of the model that is trained."""
        own = len(self.stages)
        first, last = number * own // count, -(-(number + 1) * own // count)
        return max(self.stages[first:last], key=lambda stage: stage.memory.total)


def plan_run_memory(
    deck: Deck,
    ranks: int,
    vocabulary: int,
    libraries: int = 0,
    ranks_per_node: int | None = None,
    split: Sequence[int] | None = None,
    schedule: Schedule | None = None,
) -> MemoryPlan:
    """As `plan_memory`, of all that the run has. Ranks that have other models alone come after those of the
    policy, as roles. Reward models are among it where their checkpoints can be read.
    """
    plan = plan_memory(deck, ranks, vocabulary, libraries, ranks_per_node, split, schedule)
    if deck.objective.kind not in POLICY_KINDS:
        return plan
    deck = deck.with_keys(model={"vocabulary": vocabulary})
    per_node = ranks_per_node or deck.machine.ranks_per_node or deck.machine.gpus_per_node or ranks
    division, others = RankPartition.of(deck, ranks), dict[str, _Beside]()
    if (critic := critic_deck(deck, ranks)) is not None:
        there = len(division.of_model(CRITIC))
        own = plan_memory(critic, there, critic.model.vocabulary or vocabulary, libraries, ranks_per_node)
        others[CRITIC] = _Beside(CRITIC, own.stages)
    if (reference := reference_deck(deck, ranks)) is not None:
        there = len(division.of_model(REFERENCE))
        others[REFERENCE] = _Beside(REFERENCE, _shown(reference, there, vocabulary, per_node))
    if judges := _reward_models(deck, len(division.of_model(REWARD)), per_node):
        others[REWARD] = _Beside(REWARD_MODELS, judges)
    first, *apart = division.rank_sets
    beside = [others[model] for model in first.models if model in others]
    device, tensor = device_kind(deck.run.device), deck.layout.tensor
    model, stage = plan_generation_stage(deck, len(first.ranks), tensor, per_node, device)
    if not generates_itself(deck):
        beside.append(_Beside(COPY, [_held(stage)]))
    texts, longest = concurrent_texts(deck, len(first.ranks) // tensor), deck.batch.sequence
    plans = (CachePlan.of(model, places, longest, as_in_training=True) for places in (texts, 1))
    cache, least = (plan.bytes for plan in plans)
    stages = []
    for each in plan.stages:
        joined = replace(each, memory=replace(each.memory, cache=cache), least_cache_bytes=least)
        for other in beside:
            joined = _joined(joined, other.name, other.of_stage(each.stage, len(plan.stages)))
        stages.append(joined)
    if not apart:
        return replace(plan, stages=tuple(stages))
    count = len(first.ranks) // len(stages)
    names = [POLICY] if len(stages) == 1 else [f"stage {each.stage} of the {POLICY}" for each in stages]
    roles = [(name, count) for name in names]
    for party in apart:
        runtime = 0 if on_host(device) else CONTEXT_BYTES
        joined = StageMemory(len(stages), 0, 0, MemoryAccount(other=libraries, runtime=runtime))
        for name in party.models:
            if name in others:
                joined = _joined(joined, others[name].name, others[name].of_stage(0, 1))
        stages.append(joined)
        roles.append((" and ".join(party.models), len(party.ranks)))
    return replace(plan, stages=tuple(stages), roles=tuple(roles))


def _joined(stage: StageMemory, name: str, other: StageMemory) -> StageMemory:
    """What a rank holds that holds both."""
    one, two, kept = stage.memory, other.memory, stage.state_copy_bytes + other.state_copy_bytes
    passing = max(stage.reused_buffer_bytes, other.reused_buffer_bytes)
    memory = replace(
        one,
        parameter=one.parameter + two.parameter,
        gradient=one.gradient + two.gradient,
        optimizer=one.optimizer + two.optimizer,
        activation=max(one.activation, two.activation),
        buffer=one.buffer - stage.reused_buffer_bytes + two.buffer - other.reused_buffer_bytes + passing,
        other=max(one.other - stage.state_copy_bytes, two.other - other.state_copy_bytes) + kept,
        runtime=max(one.runtime, two.runtime),
        fragmented=max(one.fragmented, two.fragmented),
    )
    held = two.parameter + two.gradient + two.optimizer
    beside = {**stage.auxiliary_bytes, name: held}
    return replace(
        stage, memory=memory, reused_buffer_bytes=passing, state_copy_bytes=kept, auxiliary_bytes=beside
    )


def _reward_models(deck: Deck, ranks: int, ranks_per_node: int) -> list[StageMemory]:
    """What all of them hold together, at the most; nothing where there are none, or one of them is not to be
    read here.
    """
    held: list[StageMemory] = []
    for name in filter(is_checkpoint, deck.policy.reward):
        try:
            path = _newest(Path(name))
            own = evaluation_deck(read_state(path), path, [], ranks)
        except (HpctrainError, OSError):
            return []
        own = own.with_keys(run={"device": deck.run.device})
        stages = _shown(own, ranks, own.model.vocabulary or 0, ranks_per_node)
        largest = _Beside(name, stages).of_stage(0, 1)
        held = [_joined(held[0], name, largest) if held else largest]
    return held


def _newest(target: Path) -> Path:
    """The checkpoint meant by a file, or by a run's folder."""
    if not target.is_dir():
        return target
    return next(iter(present_checkpoints(target / "checkpoints")), target)


def _shown(deck: Deck, ranks: int, vocabulary: int, ranks_per_node: int) -> list[StageMemory]:
    """Of a model that is only looked at, each stage of its pipeline."""
    sizes, device = axis_sizes(deck, ranks), device_kind(deck.run.device)
    architecture = architecture_of(deck, vocabulary)
    placement = place_by_flops(deck, architecture, sizes["data"])
    schedule = placement.schedule_of(micro_batches(deck, sizes["data"]))
    there = deck.memory.parameters == "device"
    transport = deck.communication.requested_transport if there else "mpi"  # ranks have files of their own
    stages = []
    for number in range(schedule.stage_count):
        mesh = PlannedMesh(sizes, number, ranks_per_node, device=device, transport=transport)
        position = PipelinePosition(schedule, placement.split, number)
        stage = plan_stage(deck, architecture, mesh, position, device, build_inference_stage)
        if deck.layout.zero > 2:
            for _ in range(2):  # the second time it gathers ahead, in the order of the first
                rehearse_forward(stage, schedule, number)
        held = _held(stage)
        if not there:
            held = replace(held, memory=replace(held.memory, parameter=0))
        stages.append(held)
    return stages


def _held(stage: Stage) -> StageMemory:
    """What its parameters take."""
    copies = planned_converted_bytes(layer for model in stage.models for layer in model.layers)
    memory = MemoryAccount(parameter=value_bytes(stage.buckets) + copies, buffer=pool_bytes(stage.buckets))
    return StageMemory(0, 0, 0, memory)
