"""From a deck to the objects of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.planned import PlannedMesh
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.rank_partition import require_no_dedicated_ranks
from hpctrain.engine.audit import audited
from hpctrain.engine.kernels import choose_kernels
from hpctrain.engine.offload_settings import OffloadSettings, open_offload
from hpctrain.engine.patterns import check_patterns
from hpctrain.engine.place import Placement, place_layers
from hpctrain.engine.recompute import make_recompute, open_shelf
from hpctrain.engine.sizes import axis_sizes, micro_batches
from hpctrain.engine.stage import (
    TrainedStage,
    build_trained_stage,
    make_groups,
    make_replications,
    offloaded_bytes,
    plan_stage,
)
from hpctrain.errors import HpctrainError
from hpctrain.memory.recompute import Recompute
from hpctrain.memory.scratch import ScratchFiles, fill_pieces
from hpctrain.model.architecture import Architecture
from hpctrain.model.build import architecture_of, build_parts, initialize_parts
from hpctrain.model.count import count
from hpctrain.model.frozen import freeze_parameters
from hpctrain.model.part import ModelPart
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape
from hpctrain.objective.factory import make_objective
from hpctrain.objective.objective import Objective
from hpctrain.optim.loss_scale import LossScale
from hpctrain.optim.noise_scale import NoiseScale
from hpctrain.optim.schedule import LearningRate
from hpctrain.optim.spikes import SpikeDetector
from hpctrain.parallel.context import context_positions
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.split import layer_ranges
from hpctrain.sharding.state import StateTensor
from hpctrain.sharding.synchronize import check_replicas


@dataclass(frozen=True)
class EngineLayout:
    """Who computes what, before anything large is there: what is saved for backward, the layers' groups, the
    model's architecture, where its layers go, and the pipeline schedule of the deck's batch.
    """

    recompute: Recompute
    groups: LayerContext
    architecture: Architecture
    placement: Placement
    schedule: Schedule


@dataclass
class Engine(TrainedStage):
    """Everything that computes, on one mesh.

    `terms` names what layers add to the losses; `schedule` is the pipeline schedule of the deck's batch.
    `companions` are engines of the same run that are trained beside it, by name: their state is its own.
    """

    world: World
    mesh: Mesh
    architecture: Architecture
    objective: Objective
    terms: tuple[str, ...]
    offload: OffloadSettings
    activation_files: ScratchFiles | None
    loss_scale: LossScale
    noise_scale: NoiseScale
    spikes: SpikeDetector
    learning_rate: LearningRate
    positions: torch.Tensor
    placement: Placement
    schedule: Schedule
    companions: dict[str, Engine] = field(default_factory=dict)

    def own_state(self) -> Iterator[StateTensor]:
        """Its state without that of companions."""
        return super().state()

    def state(self) -> Iterator[StateTensor]:
        """See TrainedStage; of a companion by names that begin with its own."""
        yield from self.own_state()
        for name, engine in self.companions.items():
            for each in engine.state():
                yield replace(each, shard=replace(each.shard, name=f"{name}.{each.shard.name}"))

    @property
    def shape(self) -> ModelShape:
        """The sizes of its transformer; of no other model."""
        assert isinstance(self.architecture, ModelShape)
        return self.architecture

    @property
    def model(self) -> ModelPart:
        """The stage's first part: all of the model where there is one stage."""
        return self.models[0]

    def close(self) -> None:
        """Remove the files in place of memory; nothing can be computed afterwards."""
        for engine in self.companions.values():
            engine.close()
        for scratch in (self.offload.scratch, self.activation_files):
            if scratch is not None:
                scratch.close()


def make_mesh(deck: Deck, world: World) -> Mesh:
    """The mesh of a deck; HpctrainError on all ranks where it does not fit the world, has servers, or models
    on ranks of their own.
    """
    if deck.communication.server is not None:
        sentence = 'is supported by `hpctrain run` and `hpctrain resume` only (expected "none" here)'
        raise HpctrainError(deck.problem("communication.server.mode", sentence))
    require_no_dedicated_ranks(deck, "is supported by `hpctrain run` and `hpctrain resume` only")
    transport = choose_link(deck, world)
    return Mesh(world, axis_sizes(deck, world.size), transport=transport)


def choose_link(deck: Deck, world: World) -> str:
    """The deck's transport, of a world that from now on emulates the deck's nodes and link, if any.
    Collective.
    """
    keys = deck.communication
    if keys.emulate is not None and world.nodes > 1:
        sentence = f"requires all ranks on one machine, not on {world.nodes} nodes (leave it out)"
        raise HpctrainError(deck.problem("communication.emulate", sentence))
    world.sum_halves_natively(keys.half_sums == "native")
    world.emulate_nodes(keys.ranks_per_node)
    world.emulate_link(keys.link)
    if deck.stability.corruption == "off":
        world.decorate_transports(None)
    else:
        from hpctrain.audit.message_audit import audit_messages

        audit_messages(world, deck.stability.corruption)
    return keys.requested_transport


def arrange(deck: Deck, world: World, mesh: Mesh) -> EngineLayout:
    """The arrangement of a deck whose vocabulary is settled. Collective; may measure layers."""
    assert deck.model.vocabulary is not None
    with world.agreement():
        recompute = make_recompute(deck, world)
        architecture = architecture_of(deck, deck.model.vocabulary)
    groups = make_groups(deck, mesh, recompute, world.device)
    if deck.stability.corruption == "full":
        groups = audited(groups, world, deck.run.seed)
    placement = place_layers(deck, architecture, groups, mesh)
    schedule = placement.schedule_of(micro_batches(deck, mesh.size("data")))
    return EngineLayout(recompute, groups, architecture, placement, schedule)


def build_engine(deck: Deck, world: World, mesh: Mesh, roughness: float = 0.0) -> Engine:
    """Model, buckets, optimizer of a deck whose vocabulary is settled, initialized from the seed.

    `roughness` is what `initialize` adds to biases and norm weights.
    """
    deck = choose_kernels(deck, world, mesh)
    return assemble(deck, world, mesh, arrange(deck, world, mesh), roughness)


def assemble(
    deck: Deck,
    world: World,
    mesh: Mesh,
    arrangement: EngineLayout,
    roughness: float = 0.0,
    build: Callable[..., TrainedStage] = build_trained_stage,
) -> Engine:
    """As `build_engine`, of what was arranged for this deck; `build` makes the stage."""
    groups, architecture, schedule = arrangement.groups, arrangement.architecture, arrangement.schedule
    number, split = mesh.coordinate("pipeline"), arrangement.placement.split
    models = build_parts(architecture, groups, layer_ranges(schedule, split, number))
    check_patterns(deck, architecture)
    freeze_parameters(models, deck.model.frozen)
    replications = make_replications(deck, mesh)
    offload = OffloadSettings()
    if {deck.memory.optimizer, deck.memory.parameters} != {"device"}:
        planned = PlannedMesh(mesh.sizes, number, world.topology.ranks_per_node)
        stage = plan_stage(deck, architecture, planned, schedule, split, number, world.device)
        offload = open_offload(deck, world, offloaded_bytes(deck, stage))
    with world.agreement():
        objective = make_objective(deck)
        stage = build(deck, groups, models, replications, offload, world.device, world.agreement)
    _initialize(world, architecture, stage, deck.run.seed, roughness)
    if groups.audit is not None:
        stage.synchronizer.all_added = groups.audit.compare
    stage.outer.begin(stage.optimizer)
    if deck.stability.check_parameters:
        check_replicas(stage.buckets, world.everyone)
    scaled = Precision.of(deck).scales_loss
    return Engine(
        **vars(stage),
        world=world,
        mesh=mesh,
        architecture=architecture,
        objective=objective,
        terms=count(architecture).terms,
        placement=arrangement.placement,
        schedule=schedule,
        offload=offload,
        activation_files=open_shelf(deck, world, arrangement.recompute, models, schedule, number),
        loss_scale=LossScale(
            deck.precision.initial_loss_scale if scaled else 1.0,
            deck.precision.loss_scale_window if scaled else 0,
        ),
        noise_scale=NoiseScale(deck.run.noise_scale_steps),
        spikes=make_spikes(deck),
        learning_rate=LearningRate(**deck.learning_rate.model_dump()),
        positions=context_positions(groups.context, groups.context_form, architecture.sequence).to(
            world.device
        ),
    )


def make_spikes(deck: Deck) -> SpikeDetector:
    """What tells the spikes of a run."""
    keys = deck.stability
    return SpikeDetector(
        keys.spike,
        keys.spike_window,
        keys.spike_factor,
        keys.spike_most,
        deck.learning_rate.warmup,
        Precision.of(deck).scales_loss,
    )


def _initialize(
    world: World, architecture: Architecture, stage: TrainedStage, seed: int, roughness: float
) -> None:
    """Fill this rank's fp32 master weights from the seed, then the parameters from them."""
    optimizer = stage.optimizer
    targets = (
        (segment.parameter, piece, offset + first)
        for bucket, master in zip(optimizer.buckets, optimizer.masters, strict=True)
        for segment, values, offset in bucket.owned(master)
        if values.numel()
        for first, piece in fill_pieces(values)
    )
    with world.agreement():
        initialize_parts(architecture, stage.models, targets, seed, roughness)
    optimizer.publish()
