"""What a rank holds of a pipeline stage, built in one way for a run and, without memory, for a plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
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
from hpctrain.engine.functions import functions_of, planned_functions
from hpctrain.engine.nodes import NodeMesh, cut_by_node, ranks_of_node
from hpctrain.engine.offload_settings import OffloadSettings, make_optimizer, planned_offload
from hpctrain.engine.rules import RULES
from hpctrain.errors import HpctrainError
from hpctrain.host.device import on_host
from hpctrain.memory.recompute import Recompute
from hpctrain.model.architecture import Architecture
from hpctrain.model.build import build_parts
from hpctrain.model.frozen import freeze_parameters
from hpctrain.model.part import ModelPart, blocks_of, parameter_list
from hpctrain.model.precision import Precision
from hpctrain.model.width_scaling import set_rates
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.optim.optimizer import Agreement, Optimizer, refresh
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.residency import ParameterResidency
from hpctrain.parallel.saved_policy import SavedPolicy
from hpctrain.parallel.vocabulary import TABLE_ROWS
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.split import layer_ranges
from hpctrain.sharding.bucket import Bucket, Store, value_bytes
from hpctrain.sharding.bucket_layout import bucket_layouts
from hpctrain.sharding.compression.between import between_nodes
from hpctrain.sharding.compression.codecs import RoundedCodec
from hpctrain.sharding.compression.compressed_reduction import CompressedReduction
from hpctrain.sharding.compression.majority import sign_sum
from hpctrain.sharding.compression.one_bit import OneBitMomentum
from hpctrain.sharding.compression.power import PowerSgd
from hpctrain.sharding.compression.top_k import TopK
from hpctrain.sharding.compression.warmed import exact_at_first
from hpctrain.sharding.eight_bit_gather import bucket_maker
from hpctrain.sharding.fragments import FragmentSchedule, fragments_of
from hpctrain.sharding.gather import make_residency
from hpctrain.sharding.local_steps import LocalSteps, OuterOptimizer
from hpctrain.sharding.measured_reduction import FirstMicroBatch, MeasuredReduction
from hpctrain.sharding.outer_format import FORMATS
from hpctrain.sharding.reducer import ExactReduction, GradientReduction, make_reducer
from hpctrain.sharding.replica_sync import ReplicaSync, SyncEveryStep
from hpctrain.sharding.replication import MeshQueries, Replications, ZeroSharding
from hpctrain.sharding.state import ModuleState, Stateful, StateTensor
from hpctrain.sharding.synchronize import GradientSynchronizer
from hpctrain.sharding.weight_maxima import WeightMaxima, quantized_products

SUMMATIONS: Mapping[str, Callable[[Deck, Bucket], GradientReduction]] = {
    "none": lambda _, bucket: ExactReduction(bucket),
    "bf16": exact_at_first(CompressedReduction.of(RoundedCodec("bf16"))),
    "int8": exact_at_first(CompressedReduction.of(RoundedCodec("int8"))),
    "sign": exact_at_first(sign_sum),
    "onebit": between_nodes(OneBitMomentum.of, of_gradients=False),
    "topk": between_nodes(TopK.of, of_gradients=False),
    "powersgd": exact_at_first(PowerSgd.of),
}
"""What makes the GradientReduction of a deck and a bucket, by `communication.compress`."""


class OuterChoice(NamedTuple):
    """What makes an ReplicaSync of a deck and a stage, and whether it lets replicas be apart."""

    make: Callable[[Deck, Stage], ReplicaSync]
    apart: bool = False

    @staticmethod
    def of(deck: Deck) -> OuterChoice:
        """The deck's."""
        steps = deck.layout.local_steps
        return OUTERS["every_step" if steps is None or not steps.has_outer_model else steps.outer]


def make_local_steps(deck: Deck, stage: Stage) -> LocalSteps:
    """What replicas do that part for some steps: both outers of a deck, by their rules."""
    keys = deck.layout.local_steps
    assert keys is not None
    blocks = {
        parameter: model.span.first + number
        for model in stage.models
        for number, block in enumerate(blocks_of(model))
        for parameter in block.own
    }
    fragments = fragments_of(stage.buckets, blocks, keys.fragments)
    timing = FragmentSchedule(keys.steps, keys.fragments, keys.delay, deck.communication.warmup)
    outer = keys.diloco
    rule = OuterOptimizer() if outer is None else OuterOptimizer(outer.learning_rate, outer.momentum)
    return LocalSteps(stage.buckets, fragments, timing, rule, keys.blend, FORMATS[keys.format])


OUTERS: Mapping[str, OuterChoice] = {
    "every_step": OuterChoice(lambda *_: SyncEveryStep()),
    "average": OuterChoice(make_local_steps, apart=True),
    "diloco": OuterChoice(make_local_steps, apart=True),
}
"""Each ReplicaSync by its name: "every_step" where replicas are not to part, or else
`layout.local_steps.outer`."""


@dataclass
class Stage:
    """What this rank holds of a pipeline stage: its parts of the model by chunk, in buckets, what gathers
    their parameters, and what modules keep. Several, of one mesh or of several, live beside each other.
    """

    groups: LayerContext
    models: list[ModelPart]
    replications: Replications
    buckets: list[Bucket]
    residency: ParameterResidency
    modules: ModuleState
    weight_maxima: WeightMaxima


@dataclass
class TrainedStage(Stage):
    """A Stage with gradients, what sums them, what keeps replicas together, what updates parameters, and who
    else keeps state of them.
    """

    synchronizer: GradientSynchronizer
    outer: ReplicaSync
    optimizer: Optimizer
    stateful: list[Stateful]

    @property
    def replica(self) -> tuple[int, int]:
        """(number, count) of this rank's replica, where these are apart."""
        parted = self.buckets[0].sharding.parted
        return (parted[0].rank, parted[0].size) if parted else (0, 1)

    def state(self) -> Iterator[StateTensor]:
        """All that belongs to parameters, and they themselves."""
        for each in (self.optimizer, *self.stateful):
            yield from each.state()


def make_groups(
    deck: Deck, mesh: MeshQueries, saved_policy: SavedPolicy, device: torch.device
) -> LayerContext:
    """The groups of the deck's layers, for a run on `device`."""
    formats = Precision.of(deck)
    return LayerContext(
        tensor=mesh.group("tensor"),
        context=mesh.group("context"),
        sequence_parallel=deck.layout.sequence_parallel,
        context_form=deck.layout.context_form,
        saved_policy=saved_policy,
        product_format=formats.product,
        eight_bits=formats.eight_bits,
        kernels=kernels_of(deck, device, mesh.group("data").size),
        functions=functions_of(deck, device),
        table_rows=1 if on_host(device) else TABLE_ROWS,
        expert=mesh.group("expert"),
        expert_tensor=mesh.group("expert_tensor"),
        micro_batch=mesh.group("context", "tensor"),
        data=mesh.group("data"),
        pipeline=mesh.group("pipeline"),
    )


def make_replications(deck: Deck, mesh: NodeMesh) -> Replications:
    """Who holds which pieces, by the deck's ZeRO."""
    dense, nodes = mesh.group("data", "context"), cut_by_node(deck, mesh)
    apart = OuterChoice.of(deck).apart

    def shard(everyone: Group) -> ZeroSharding:
        parted = has_outer_model(deck)
        size = everyone.size // deck.layout.replicas if parted else zero_group_size(deck, mesh, everyone)
        # Of experts that no other rank of the group has, nothing is to be cut, or to be gathered.
        whole = size == 1 and everyone is not dense and deck.memory.parameters == "device"
        if parted:
            return ZeroSharding(
                0 if whole else deck.layout.zero, *mesh.split_group(everyone, size), apart, nodes(everyone)
            )
        if whole:
            return ZeroSharding(0, everyone, mesh.new_subgroup("data", 1))
        if size == everyone.size:
            return ZeroSharding(
                deck.layout.zero, everyone, mesh.new_subgroup("data", 1), nodes=nodes(everyone)
            )
        return ZeroSharding(deck.layout.zero, *mesh.split_group(everyone, size), apart)

    return Replications(mesh, shard)


def zero_group_size(deck: Deck, mesh: NodeMesh, everyone: Group) -> int:
    """Over how many of `everyone`, who train on other tokens, ZeRO cuts. Collective.

    HpctrainError on all of them where `layout.zero_group = "node"` and their nodes do not have as many each.
    """
    wish = deck.layout.zero_group
    if deck.layout.zero == 0 or wish is None:
        return everyone.size
    if wish != "node":
        assert everyone.size % wish == 0, (wish, everyone.size)
        return wish
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
    """Give the parts of a stage their memory. `store` makes that of slices, `trained` as in Bucket."""
    size, own = deck.communication.bucket_bytes, Precision.of(deck)
    # Beside adapters nothing is trained: it has neither gradients nor state.
    apart = deck.model.adapters is not None
    layouts = (each for part in models for each in bucket_layouts(part.units(), replications, size, apart))
    layers = [layer for model in models for layer in model.layers]
    make = bucket_maker(layers)
    buckets = [
        make(layout, own.storage, own.gradient, trained and (layout.trained or not apart), store)
        for layout in layouts
    ]
    blocks = [block.held for model in models for block in blocks_of(model)]
    lasting = [parameter for layer in layers if layer.lasting for parameter in layer.held]
    residency = make_residency(buckets, blocks, deck.memory.keep_gathered, lasting)
    for model in models:
        model.residency = residency
    modules = ModuleState(layers, replications)
    maxima = WeightMaxima(quantized_products(layers), buckets, groups.tensor)
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
    """As `build_stage`, to be trained; what is to be frozen is frozen already. `offload` makes the memory of
    what does not live on the run's `device`.
    """
    set_rates(models, deck)
    rule = RULES[deck.optimizer.name](deck)
    if isinstance(rule, MatrixRules):
        rule.assign([parameter for model in models for parameter in parameter_list(model)])
    stage = build_stage(deck, groups, models, replications, offload.parameters, trained=True)
    summed = [bucket for bucket in stage.buckets if bucket.trained]
    summations = [SUMMATIONS[deck.communication.compress](deck, bucket) for bucket in summed]
    summing, first = summations, None
    if deck.run.noise_scale_steps and all(bucket.sharding.ranks == 1 for bucket in stage.buckets):
        first = FirstMicroBatch(stage.buckets[0].sharding.group.device)
    elif deck.run.noise_scale_steps:
        summing = list(map(MeasuredReduction, summed, summations))
    reducers = list(map(make_reducer, summed, summing))
    outer, in_order = OuterChoice.of(deck).make(deck, stage), deck.model.module is not None
    sliced = deck.memory.accumulate == "sliced"
    return TrainedStage(
        **vars(stage),
        synchronizer=GradientSynchronizer(reducers, outer, sliced, first, in_order),
        outer=outer,
        optimizer=make_optimizer(deck, stage.buckets, offload.optimizer, device, agreement),
        stateful=[each for each in (outer, *summations, stage.modules) if isinstance(each, Stateful)],
    )


def plan_stage(
    deck: Deck,
    architecture: Architecture,
    mesh: PlannedMesh,
    schedule: Schedule,
    split: Sequence[int],
    number: int,
    device: torch.device,
    build: Callable[..., TrainedStage] = build_trained_stage,
) -> TrainedStage:
    """A stage of the pipeline as its first rank along the other axes builds it, without its memory.

    The others of the stage hold as much: what does not divide is padded alike. The tensors that a run has
    on its `device` lie on torch's device "meta", which keeps shapes alone. `build` is what makes it of these.
    """
    groups = make_groups(planned_functions(deck), mesh, Recompute(deck.memory.recompute), device)
    with META:
        models = build_parts(architecture, groups, layer_ranges(schedule, split, number))
        freeze_parameters(models, deck.model.frozen)
        replications = make_replications(deck, mesh)
        return build(deck, groups, models, replications, planned_offload(deck), device)


def offloaded_bytes(deck: Deck, stage: TrainedStage) -> dict[str, int]:
    """Bytes of a planned stage's "optimizer" state and "parameters" that do not live on the device."""
    state = (
        flat.nbytes
        for bucket, state in zip(stage.buckets, stage.optimizer.states, strict=True)
        for flat in state.values()
        if flat is not bucket.own_values
    )
    return {
        "optimizer": sum(state) if deck.memory.optimizer != "device" else 0,
        "parameters": value_bytes(stage.buckets) if deck.memory.parameters != "device" else 0,
    }


def load_parameters(path: Path, stage: Stage, everyone: Group) -> None:
    """Fill a stage that is not trained from a checkpoint; collective.

    Weights that are not finite are logged as a warning, so that such a model can still be examined. Errors as
    in `checkpoint.read.load`.
    """
    structure = examine(path, everyone)
    kept, left = resumed_entries(stage.modules.state(), structure.datasets)
    wanted = [(entry, structure.datasets.get(entry.dataset)) for entry in model_entries(stage.buckets)]
    # What replicas have in common is stored in fp32, whatever the format of the parameters.
    read = [
        replace(entry, values=torch.empty(entry.values.numel()))
        if found is not None and found.kind == "float32" and entry.kind != found.kind
        else entry
        for entry, found in wanted
    ]
    load(structure, everyone, [*read, *kept], left=left)
    weight = nonfinite_weight(everyone, read)
    if weight is not None and everyone.rank == 0:
        sentence = nonfinite_sentence(path, weight, "the results of this model may be NaN or infinite")
        logging.getLogger("hpctrain").warning("%s", sentence)
    for (entry, _), each in zip(wanted, read, strict=True):
        if each is not entry:
            assert isinstance(entry.values, torch.Tensor) and isinstance(each.values, torch.Tensor)
            entry.values.copy_(each.values)
    refresh(stage.buckets)
