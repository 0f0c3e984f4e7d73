"""Memory plan of a whole run: of the model that it trains, and of a policy's auxiliary models.

A critic is trained like the policy, in its own layout. A reference model, reward models, and a copy that
generates texts have only parameters. Each model may have ranks of its own. Models on the same ranks compute
in turn, so that they share memory which is only needed during a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.checkpoint.evaluation_deck import evaluation_deck
from hpctrain.checkpoint.load import read_state
from hpctrain.checkpoint.names import current_checkpoints
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
from hpctrain.plan.memory_plan import MemoryPlan, StageMemory, plan_memory
from hpctrain.plan.step_on_meta import rehearse_forward

REWARD_MODELS = "reward model"


@dataclass(frozen=True)
class _AuxiliaryModel:
    """Memory of an auxiliary model.

    Attributes:
        name: Name of the model.
        stages: Memory of the ranks of each of its pipeline stages, in their order.
    """

    name: str
    stages: Sequence[StageMemory]

    def on_stage(self, number: int, count: int) -> StageMemory:
        """Return its largest memory on the ranks of stage `number` of a trained model with `count` stages."""
        own = len(self.stages)
        first, last = number * own // count, -(-(number + 1) * own // count)
        return max(self.stages[first:last], key=lambda stage: stage.memory.total)


def plan_run_memory(
    deck: Deck,
    ranks: int,
    vocabulary: int,
    process_bytes: int = 0,
    ranks_per_node: int | None = None,
    split: Sequence[int] | None = None,
    schedule: Schedule | None = None,
) -> MemoryPlan:
    """Return the memory plan of a run, with its auxiliary models. The arguments are those of `plan_memory`.

    Sets of ranks that have only auxiliary models are entries of `stages` after those of the policy. Then
    `roles` names all entries.
    Reward models count only if the checkpoints of all of them can be read.
    """
    plan = plan_memory(deck, ranks, vocabulary, process_bytes, ranks_per_node, split, schedule)
    if deck.objective.kind not in POLICY_KINDS:
        return plan
    deck = deck.with_keys(model={"vocabulary": vocabulary})
    per_node = ranks_per_node or deck.machine.known_ranks_per_node or ranks
    auxiliary = _auxiliary_models(deck, ranks, vocabulary, process_bytes, ranks_per_node)
    first, *further = RankPartition.of(deck, ranks).rank_sets
    policy_models = [auxiliary[model] for model in first.models if model in auxiliary]
    device, tensor = device_kind(deck.run.device), deck.layout.tensor
    model, stage = plan_generation_stage(deck, len(first.ranks), tensor, per_node, device)
    if not generates_itself(deck):
        policy_models.append(_AuxiliaryModel(COPY, [_parameter_memory(stage)]))
    texts, longest = concurrent_texts(deck, len(first.ranks) // tensor), deck.batch.sequence
    plans = (CachePlan.of(model, places, longest, as_in_training=True) for places in (texts, 1))
    cache, least = (plan.bytes for plan in plans)
    stages = []
    for each in plan.stages:
        joined = replace(each, memory=replace(each.memory, cache=cache), least_cache_bytes=least)
        for other in policy_models:
            joined = _joined(joined, other.name, other.on_stage(each.stage, len(plan.stages)))
        stages.append(joined)
    if not further:
        return replace(plan, stages=tuple(stages))
    count = len(first.ranks) // len(stages)
    names = [POLICY] if len(stages) == 1 else [f"stage {each.stage} of the {POLICY}" for each in stages]
    roles = [(name, count) for name in names]
    runtime = 0 if on_host(device) else CONTEXT_BYTES
    for rank_set in further:
        joined = StageMemory(len(stages), 0, 0, MemoryAccount(other=process_bytes, runtime=runtime))
        for name in rank_set.models:
            if name in auxiliary:
                joined = _joined(joined, auxiliary[name].name, auxiliary[name].on_stage(0, 1))
        stages.append(joined)
        roles.append((" and ".join(rank_set.models), len(rank_set.ranks)))
    return replace(plan, stages=tuple(stages), roles=tuple(roles))


def _auxiliary_models(
    deck: Deck, ranks: int, vocabulary: int, process_bytes: int, ranks_per_node: int | None
) -> dict[str, _AuxiliaryModel]:
    """Return the auxiliary models of a policy by their role: critic, reference model and reward models."""
    partition, models = RankPartition.of(deck, ranks), dict[str, _AuxiliaryModel]()
    per_node = ranks_per_node or deck.machine.known_ranks_per_node or ranks
    if (critic := critic_deck(deck, ranks)) is not None:
        own_ranks, own_vocabulary = len(partition.of_model(CRITIC)), critic.model.vocabulary or vocabulary
        own = plan_memory(critic, own_ranks, own_vocabulary, process_bytes, ranks_per_node)
        models[CRITIC] = _AuxiliaryModel(CRITIC, own.stages)
    if (reference := reference_deck(deck, ranks)) is not None:
        own_ranks = len(partition.of_model(REFERENCE))
        stages = _inference_stages(reference, own_ranks, vocabulary, per_node)
        models[REFERENCE] = _AuxiliaryModel(REFERENCE, stages)
    if reward_models := _reward_models(deck, len(partition.of_model(REWARD)), per_node):
        models[REWARD] = _AuxiliaryModel(REWARD_MODELS, reward_models)
    return models


def _joined(stage: StageMemory, name: str, other: StageMemory) -> StageMemory:
    """Return the memory of a rank of `stage` that also has an auxiliary model with memory `other`."""
    one, two, copied = stage.memory, other.memory, stage.state_copy_bytes + other.state_copy_bytes
    reused = max(stage.reused_buffer_bytes, other.reused_buffer_bytes)
    memory = replace(
        one,
        parameter=one.parameter + two.parameter,
        gradient=one.gradient + two.gradient,
        optimizer=one.optimizer + two.optimizer,
        activation=max(one.activation, two.activation),
        buffer=one.buffer - stage.reused_buffer_bytes + two.buffer - other.reused_buffer_bytes + reused,
        other=max(one.other - stage.state_copy_bytes, two.other - other.state_copy_bytes) + copied,
        runtime=max(one.runtime, two.runtime),
        fragmented=max(one.fragmented, two.fragmented),
    )
    states = two.parameter + two.gradient + two.optimizer
    return replace(
        stage,
        memory=memory,
        reused_buffer_bytes=reused,
        state_copy_bytes=copied,
        auxiliary_bytes={**stage.auxiliary_bytes, name: states},
    )


def _reward_models(deck: Deck, ranks: int, ranks_per_node: int) -> list[StageMemory]:
    """Return the memory of all reward models together, at most one element.

    It is empty if the deck has no reward model, or if the checkpoint of one cannot be read here.
    """
    joined: list[StageMemory] = []
    for name in filter(is_checkpoint, deck.policy.reward):
        try:
            path = _newest_checkpoint(Path(name))
            own = evaluation_deck(read_state(path), path, [], ranks)
        except (HpctrainError, OSError):
            return []
        own = own.with_keys(run={"device": deck.run.device})
        stages = _inference_stages(own, ranks, own.model.vocabulary or 0, ranks_per_node)
        largest = _AuxiliaryModel(name, stages).on_stage(0, 1)
        joined = [_joined(joined[0], name, largest) if joined else largest]
    return joined


def _newest_checkpoint(target: Path) -> Path:
    """Return the newest checkpoint of a run's folder; the path itself if it is a file or has none."""
    if not target.is_dir():
        return target
    return next(iter(current_checkpoints(target / "checkpoints")), target)


def _inference_stages(deck: Deck, ranks: int, vocabulary: int, ranks_per_node: int) -> list[StageMemory]:
    """Return the memory of each pipeline stage of a model that is not trained."""
    sizes, device = axis_sizes(deck, ranks), device_kind(deck.run.device)
    architecture = architecture_of(deck, vocabulary)
    placement = place_by_flops(deck, architecture, sizes["data"])
    schedule = placement.schedule_of(micro_batches(deck, sizes["data"]))
    on_device = deck.memory.parameters == "device"
    # Offloaded parameters are in files of each rank, so that other ranks cannot read them from shared memory.
    transport = deck.communication.requested_transport if on_device else "mpi"
    stages = []
    for number in range(schedule.stage_count):
        mesh = PlannedMesh(sizes, number, ranks_per_node, device=device, transport=transport)
        position = PipelinePosition(schedule, placement.split, number)
        stage = plan_stage(deck, architecture, mesh, position, device, build_inference_stage)
        if deck.layout.zero > 2:
            for _ in range(2):  # the second pass prefetches in the order of the first
                rehearse_forward(stage, schedule, number)
        planned = _parameter_memory(stage)
        if not on_device:
            planned = replace(planned, memory=replace(planned.memory, parameter=0))
        stages.append(planned)
    return stages


def _parameter_memory(stage: Stage) -> StageMemory:
    """Return the memory of a stage's parameters and of the buffers that gather them."""
    copies = planned_converted_bytes(layer for model in stage.models for layer in model.layers)
    memory = MemoryAccount(parameter=value_bytes(stage.buckets) + copies, buffer=pool_bytes(stage.buckets))
    return StageMemory(0, 0, 0, memory)
