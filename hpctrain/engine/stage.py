"""Construction of a pipeline stage: model parts, buckets, gradient reduction, replicas and optimizer.

A run builds a stage in memory. A plan builds the same stage on torch's device "meta", which has no memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from hpctrain.checkpoint.checkpoint_index import examine
from hpctrain.checkpoint.entries import model_entries, resumed_entries
from hpctrain.checkpoint.finite import nonfinite_sentence, nonfinite_weight
from hpctrain.checkpoint.read import load
from hpctrain.comm.group import Group
from hpctrain.comm.planned import META, PlannedMesh
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.local_steps import has_outer_model
from hpctrain.engine.deck_kernels import kernels_of
from hpctrain.engine.function_choice import functions_of, planned_functions
from hpctrain.engine.node_groups import NodeMesh, cut_by_node, ranks_of_node
from hpctrain.engine.offload_settings import OffloadSettings, make_optimizer, planned_offload
from hpctrain.engine.update_rules import RULES, compression_settings
from hpctrain.errors import HpctrainError
from hpctrain.host.device import on_host
from hpctrain.memory.recompute import Recompute
from hpctrain.model.architecture import Architecture
from hpctrain.model.construction import build_parts
from hpctrain.model.frozen import freeze_parameters
from hpctrain.model.part import ModelPart, blocks_of, parameter_list
from hpctrain.model.precision import Precision
from hpctrain.model.width_scaling import set_rates
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.optim.optimizer import Agreement, Optimizer, refresh
from hpctrain.parallel.layer_context import LayerContext, ProductSettings
from hpctrain.parallel.residency import ParameterResidency
from hpctrain.parallel.saved_policy import SavedPolicy
from hpctrain.parallel.vocabulary import TABLE_ROWS
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.split import layer_ranges
from hpctrain.sharding.bucket import Bucket, Store, value_bytes
from hpctrain.sharding.bucket_layout import BucketLayout, bucket_layouts
from hpctrain.sharding.compression.methods import make_reduction
from hpctrain.sharding.eight_bit_gather import make_bucket
from hpctrain.sharding.gather import make_residency
from hpctrain.sharding.local_steps.fragments import FragmentSchedule, fragments_of
from hpctrain.sharding.local_steps.local_steps import LocalSteps, OuterOptimizer
from hpctrain.sharding.local_steps.outer_format import FORMATS
from hpctrain.sharding.measured_reduction import FirstMicroBatch, MeasuredReduction
from hpctrain.sharding.reducer import Reducer
from hpctrain.sharding.replica_sync import ReplicaSync, SyncEveryStep
from hpctrain.sharding.replication import MeshQueries, Replications, ZeroSharding
from hpctrain.sharding.state import ModuleState, Stateful, StateTensor
from hpctrain.sharding.synchronize import GradientSynchronizer
from hpctrain.sharding.weight_maxima import WeightMaxima, products_in_8_bits


class ReplicaSyncChoice(NamedTuple):
    """Function that makes a ReplicaSync of a deck and a stage, and True if replicas diverge under it."""

    make: Callable[[Deck, Stage], ReplicaSync]
    diverging: bool = False

    @staticmethod
    def of(deck: Deck) -> ReplicaSyncChoice:
        """Return the choice of a deck."""
        steps = deck.layout.local_steps
        return REPLICA_SYNCS["every_step" if steps is None or not steps.has_outer_model else steps.outer]


def make_local_steps(deck: Deck, stage: Stage) -> LocalSteps:
    """Return the synchronization of replicas that diverge for some steps (Local SGD or DiLoCo). Local."""
    keys = deck.layout.local_steps
    assert keys is not None
    blocks = {
        parameter: model.span.first + number
        for model in stage.models
        for number, block in enumerate(blocks_of(model))
        for parameter in block.all_parameters
    }
    fragments = fragments_of(stage.buckets, blocks, keys.fragments)
    timing = FragmentSchedule(keys.steps, keys.fragments, keys.delay, deck.communication.warmup)
    outer = keys.diloco
    rule = OuterOptimizer() if outer is None else OuterOptimizer(outer.learning_rate, outer.momentum)
    return LocalSteps(stage.buckets, fragments, timing, rule, keys.blend, FORMATS[keys.format])


REPLICA_SYNCS: Mapping[str, ReplicaSyncChoice] = {
    "every_step": ReplicaSyncChoice(lambda *_: SyncEveryStep()),
    "average": ReplicaSyncChoice(make_local_steps, diverging=True),
    "diloco": ReplicaSyncChoice(make_local_steps, diverging=True),
}
"""Choices by `layout.local_steps.outer`; "every_step" if replicas do not diverge."""


@dataclass
class Stage:
    """Model parts that this rank holds, without training.

    A rank may hold several stages, of one mesh or of several.

    Attributes:
        groups: Context of the layers.
        models: Model parts by chunk.
        replications: Ranks that hold each shard.
        buckets: Buckets of all parameters.
        residency: Brings parameters to the device before they are used.
        modules: State of layers that is no parameter.
        weight_maxima: Function that returns a context in which 8-bit products know their largest weights.
    """

    groups: LayerContext
    models: list[ModelPart]
    replications: Replications
    buckets: list[Bucket]
    residency: ParameterResidency
    modules: ModuleState
    weight_maxima: Callable[[], AbstractContextManager[None]]


@dataclass
class TrainedStage(Stage):
    """Stage that is trained.

    Attributes:
        synchronizer: Reduces gradients.
        outer: Synchronizes replicas.
        optimizer: Updates parameters.
        stateful: Further owners of state.
    """

    synchronizer: GradientSynchronizer
    outer: ReplicaSync
    optimizer: Optimizer
    stateful: list[Stateful]

    @property
    def replica(self) -> tuple[int, int]:
        """Number of this rank's replica and number of replicas; (0, 1) if replicas do not diverge."""
        parted = self.buckets[0].sharding.diverging_groups
        return (parted[0].rank, parted[0].size) if parted else (0, 1)

    def state(self) -> Iterator[StateTensor]:
        """Yield the parameters and all state that belongs to them."""
        for each in (self.optimizer, *self.stateful):
            yield from each.state()


def make_groups(
    deck: Deck, mesh: MeshQueries, saved_policy: SavedPolicy, device: torch.device
) -> LayerContext:
    """Return the context of a deck's layers: their groups, formats, kernels and functions.

    Args:
        deck: The deck.
        mesh: Arrangement of the ranks, or a planned one.
        saved_policy: Decides what layers save for the backward pass.
        device: Device of the run.
    """
    return LayerContext(
        tensor=mesh.group("tensor"),
        context=mesh.group("context"),
        sequence_parallel=deck.layout.sequence_parallel,
        context_form=deck.layout.context_form,
        saved_policy=saved_policy,
        products=ProductSettings(kernels_of(deck, device, mesh.group("data").size), Precision.of(deck).fp8),
        functions=functions_of(deck, device),
        table_rows=1 if on_host(device) else TABLE_ROWS,
        expert=mesh.group("expert"),
        expert_tensor=mesh.group("expert_tensor"),
        micro_batch=mesh.group("context", "tensor"),
        data=mesh.group("data"),
        pipeline=mesh.group("pipeline"),
    )


def make_replications(deck: Deck, mesh: NodeMesh) -> Replications:
    """Return which ranks hold each shard, with the deck's ZeRO stage and groups. Collective."""
    dense, nodes = mesh.group("data", "context"), cut_by_node(deck, mesh)
    diverging = ReplicaSyncChoice.of(deck).diverging

    def shard(everyone: Group) -> ZeroSharding:
        parted = has_outer_model(deck)
        size = everyone.size // deck.layout.replicas if parted else zero_group_size(deck, mesh, everyone)
        # Experts that no other rank of the group holds are neither sharded nor gathered.
        is_unsharded = size == 1 and everyone is not dense and deck.memory.parameters == "device"
        if parted:
            return ZeroSharding(
                0 if is_unsharded else deck.layout.zero,
                *mesh.split_group(everyone, size),
                diverging,
                nodes(everyone),
            )
        if is_unsharded:
            return ZeroSharding(0, everyone, mesh.new_subgroup("data", 1))
        if size == everyone.size:
            return ZeroSharding(
                deck.layout.zero, everyone, mesh.new_subgroup("data", 1), nodes=nodes(everyone)
            )
        return ZeroSharding(deck.layout.zero, *mesh.split_group(everyone, size), diverging)

    return Replications(mesh, shard)


def zero_group_size(deck: Deck, mesh: NodeMesh, everyone: Group) -> int:
    """Return the number of ranks over which ZeRO shards. Collective over `everyone`.

    Args:
        deck: The deck.
        mesh: Arrangement of the ranks.
        everyone: All ranks that hold the same parameters and train on different tokens.

    Raises:
        HpctrainError: On all ranks if `layout.zero_group = "node"` and nodes have different numbers of them.
    """
    requested = deck.layout.zero_group
    if deck.layout.zero == 0 or requested is None:
        return everyone.size
    if requested != "node":
        assert everyone.size % requested == 0, (requested, everyone.size)
        return requested
    size = ranks_of_node(mesh, everyone)
    if not size:
        among = everyone.name.replace("_", " ")
        sentence = f"requires the same number of {among} ranks on every node"
        raise HpctrainError(deck.problem("layout.zero_group", sentence))
    return size


def build_stage(
    deck: Deck,
    groups: LayerContext,
    models: Sequence[ModelPart],
    replications: Replications,
    store: Store | None = None,
    trained: bool = False,
) -> Stage:
    """Put the parameters of model parts into buckets, which allocates their memory.

    Args:
        deck: The deck.
        groups: Context of the layers.
        models: Model parts by chunk, without memory.
        replications: Ranks that hold each shard.
        store: Makes the memory of ZeRO slices outside the device; None for the device.
        trained: True if parameters have gradients.
    """
    size, precision = deck.communication.bucket_bytes, Precision.of(deck)
    # With adapters, all other parameters have neither gradients nor state, so they have buckets of their own.
    separate = deck.model.adapters is not None
    layouts = (each for part in models for each in bucket_layouts(part.units(), replications, size, separate))
    layers = [layer for model in models for layer in model.layers]
    products = products_in_8_bits(layers)

    def allocate(layout: BucketLayout) -> Bucket:
        is_trained = trained and (layout.trained or not separate)
        return make_bucket(products, layout, precision.storage, precision.gradient, is_trained, store)

    buckets = list(map(allocate, layouts))
    blocks = [block.gather_keys for model in models for block in blocks_of(model)]
    lasting = [parameter for layer in layers if layer.lasting for parameter in layer.gather_keys]
    residency = make_residency(buckets, blocks, deck.memory.keep_gathered, lasting)
    for model in models:
        model.residency = residency
    modules = ModuleState(layers, replications)
    maxima = WeightMaxima(products, buckets, groups.tensor).known if products else nullcontext
    return Stage(groups, list(models), replications, buckets, residency, modules, maxima)


def build_trained_stage(
    deck: Deck,
    groups: LayerContext,
    models: Sequence[ModelPart],
    replications: Replications,
    offload: OffloadSettings,
    device: torch.device,
    agreement: Agreement = nullcontext,
) -> TrainedStage:
    """Build a stage with gradients and an optimizer. Collective over the ranks of the mesh.

    Args:
        deck: The deck.
        groups: Context of the layers.
        models: Model parts by chunk, without memory, in which parameters are already frozen.
        replications: Ranks that hold each shard.
        offload: Makes memory outside the device.
        device: Device of the run.
        agreement: Context of operations that may fail on one rank alone.
    """
    set_rates(models, deck)
    rule = RULES[deck.optimizer.name](deck)
    if isinstance(rule, MatrixRules):
        rule.assign([parameter for model in models for parameter in parameter_list(model)])
    stage = build_stage(deck, groups, models, replications, offload.parameters, trained=True)
    trained = [bucket for bucket in stage.buckets if bucket.trained]
    compression = compression_settings(deck)
    reductions = [make_reduction(compression, bucket) for bucket in trained]
    measured, first = reductions, None
    if deck.run.noise_scale_steps and all(bucket.sharding.ranks == 1 for bucket in stage.buckets):
        first = FirstMicroBatch(stage.buckets[0].sharding.group.device)
    elif deck.run.noise_scale_steps:
        measured = list(map(MeasuredReduction, trained, reductions))
    reducers = list(map(Reducer, trained, measured))
    outer, in_order = ReplicaSyncChoice.of(deck).make(deck, stage), deck.model.module is not None
    sliced = deck.memory.accumulate == "sliced"
    return TrainedStage(
        **vars(stage),
        synchronizer=GradientSynchronizer(reducers, outer, sliced, first, in_order),
        outer=outer,
        optimizer=make_optimizer(deck, stage.buckets, offload.optimizer, device, agreement),
        stateful=[each for each in (outer, *reductions, stage.modules) if isinstance(each, Stateful)],
    )


class PipelinePosition(NamedTuple):
    """Stage of a pipeline.

    Attributes:
        schedule: Pipeline schedule.
        split: Number of blocks of each pipeline part.
        number: Number of the stage.
    """

    schedule: Schedule
    split: Sequence[int]
    number: int


def plan_stage(
    deck: Deck,
    architecture: Architecture,
    mesh: PlannedMesh,
    position: PipelinePosition,
    device: torch.device,
    build: Callable[..., TrainedStage] = build_trained_stage,
) -> TrainedStage:
    """Return a stage as its first rank along all other axes builds it, but without memory. Local.

    The other ranks of the stage hold the same amount, because of padding. Tensors that a run has on its
    device are on torch's device "meta".

    Args:
        deck: The deck.
        architecture: Architecture of the model.
        mesh: Planned mesh, at the first rank of the stage.
        position: Stage of the pipeline.
        device: Device of the run.
        build: Function that builds the stage, with the parameters of `build_trained_stage`.
    """
    groups = make_groups(planned_functions(deck), mesh, Recompute(deck.memory.recompute), device)
    with META:
        models = build_parts(architecture, groups, layer_ranges(*position))
        freeze_parameters(models, deck.model.frozen)
        replications = make_replications(deck, mesh)
        return build(deck, groups, models, replications, planned_offload(deck), device)


def offloaded_bytes(deck: Deck, stage: TrainedStage) -> dict[str, int]:
    """Return the bytes of "optimizer" state and "parameters" of a planned stage outside the device."""
    state = (
        flat.nbytes
        for bucket, state in zip(stage.buckets, stage.optimizer.states, strict=True)
        for flat in state.values()
        if flat is not bucket.owned_values
    )
    return {
        "optimizer": sum(state) if deck.memory.optimizer != "device" else 0,
        "parameters": value_bytes(stage.buckets) if deck.memory.parameters != "device" else 0,
    }


def load_parameters(path: Path, stage: Stage, everyone: Group) -> None:
    """Load the parameters of a stage that is not trained from a checkpoint. Collective over `everyone`.

    Weights that are not finite cause a warning in the log, so that such a model can still be examined. It
    raises what `checkpoint.read.load` raises.
    """
    structure = examine(path, everyone)
    module_entries, left = resumed_entries(stage.modules.state(), structure.datasets)
    entries = [(entry, structure.datasets.get(entry.dataset)) for entry in model_entries(stage.buckets)]
    # The common weights of replicas are stored in fp32, even if parameters have another dtype.
    read = [
        replace(entry, values=torch.empty(entry.values.numel()))
        if stored is not None and stored.kind == "float32" and entry.kind != stored.kind
        else entry
        for entry, stored in entries
    ]
    load(structure, everyone, [*read, *module_entries], left=left)
    weight = nonfinite_weight(everyone, read)
    if weight is not None and everyone.rank == 0:
        sentence = nonfinite_sentence(path, weight, "the results of this model may be NaN or infinite")
        logging.getLogger("hpctrain").warning("%s", sentence)
    for (entry, _), each in zip(entries, read, strict=True):
        if each is not entry:
            assert isinstance(entry.values, torch.Tensor) and isinstance(each.values, torch.Tensor)
            entry.values.copy_(each.values)
    refresh(stage.buckets)
