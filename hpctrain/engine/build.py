"""Construction of an engine, which has everything that computes, from a deck.

The order is: `make_mesh` arranges the ranks, `arrange` decides where layers go, and `assemble` builds the
model, its buckets, the optimizer and what belongs to them. `build_engine` does the last two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.planned import PlannedMesh
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.rank_partition import require_no_dedicated_ranks
from hpctrain.engine.groups import make_groups
from hpctrain.engine.kernel_choice import choose_kernels
from hpctrain.engine.layer_placement import LayerPlacement, place_layers
from hpctrain.engine.mesh_sizes import axis_sizes, micro_batches
from hpctrain.engine.name_patterns import check_patterns
from hpctrain.engine.offload_settings import OffloadSettings, open_offload
from hpctrain.engine.planned_stage import PipelinePosition, offloaded_bytes, plan_stage
from hpctrain.engine.recompute_settings import make_saved_policy, open_activation_store
from hpctrain.engine.registry import extend_groups, start_features
from hpctrain.engine.stage import StageBuilder, StageSetup, TrainedStage, build_trained_stage
from hpctrain.engine.stage_values import initialize
from hpctrain.engine.zero_groups import make_replications
from hpctrain.errors import HpctrainError
from hpctrain.memory.scratch import ScratchFiles
from hpctrain.model.architecture import Architecture
from hpctrain.model.construction import architecture_of, build_parts
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
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.sequence import context_positions
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.split import layer_ranges
from hpctrain.sharding.state import StateTensor


@dataclass(frozen=True)
class EngineLayout:
    """Decisions that are made before any large memory is allocated.

    Attributes:
        groups: Context of the layers, with their groups and kernels.
        architecture: Architecture of the model.
        placement: Number of blocks of each pipeline part, and schedules for any number of micro-batches.
        schedule: Pipeline schedule of the deck's batch.
    """

    groups: LayerContext
    architecture: Architecture
    placement: LayerPlacement
    schedule: Schedule


@dataclass
class UpdateControl:
    """Schedules and detectors that decide whether and how far each step updates the parameters.

    Attributes:
        learning_rate: Learning rate by step.
        loss_scale: Factor of losses in fp16.
        noise_scale: Estimate of the gradient noise scale.
        spikes: Detector of loss spikes.
    """

    learning_rate: LearningRate
    loss_scale: LossScale
    noise_scale: NoiseScale
    spikes: SpikeDetector

    @staticmethod
    def of(deck: Deck) -> UpdateControl:
        """Return the control of a deck's updates, as at the start of a run."""
        keys, scaled = deck.stability, Precision.of(deck).scales_loss
        return UpdateControl(
            LearningRate(**deck.learning_rate.model_dump()),
            LossScale(
                deck.precision.initial_loss_scale if scaled else 1.0,
                deck.precision.loss_scale_window if scaled else 0,
            ),
            NoiseScale(deck.run.noise_scale_steps),
            SpikeDetector(
                keys.spike,
                keys.spike_window,
                keys.spike_factor,
                keys.spike_most,
                deck.learning_rate.warmup,
                scaled,
            ),
        )


@dataclass
class Engine:
    """Everything that computes a model on one mesh.

    Attributes:
        world: All ranks of the engine.
        mesh: Arrangement of these ranks.
        architecture: Architecture of the model.
        stage: Model parts of this rank, with their gradients and optimizer.
        objective: Losses and metrics.
        control: Learning rate, loss scale, noise scale and loss spikes.
        placement: Number of blocks of each pipeline part.
        schedule: Pipeline schedule of the deck's batch.
        positions: Positions of this rank's tokens in a sequence, on the device.
        offload: Description of memory outside the device, for the log.
        scratch: Files of this rank with offloaded state, parameters and activations.
        auxiliary_engines: Engines of models that are trained in the same run, such as a critic, by name.
    """

    world: World
    mesh: Mesh
    architecture: Architecture
    stage: TrainedStage
    objective: Objective
    control: UpdateControl
    placement: LayerPlacement
    schedule: Schedule
    positions: torch.Tensor
    offload: str
    scratch: Sequence[ScratchFiles]
    auxiliary_engines: dict[str, Engine] = field(default_factory=dict)

    def state(self) -> Iterator[StateTensor]:
        """Yield all state. Tensors of an auxiliary engine have its name as a prefix."""
        yield from self.stage.state()
        for name, engine in self.auxiliary_engines.items():
            for each in engine.state():
                yield replace(each, shard=replace(each.shard, name=f"{name}.{each.shard.name}"))

    @property
    def shape(self) -> ModelShape:
        """Sizes of the transformer. There is none for a user's module."""
        assert isinstance(self.architecture, ModelShape)
        return self.architecture

    @property
    def model(self) -> ModelPart:
        """First model part of this stage, which is the whole model if there is one stage with one chunk."""
        return self.stage.models[0]

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the auxiliary losses that layers add."""
        return count(self.architecture).terms

    def close(self) -> None:
        """Remove the files of offloaded tensors. Nothing can be computed afterwards. Local."""
        for engine in self.auxiliary_engines.values():
            engine.close()
        for scratch in self.scratch:
            scratch.close()


def make_mesh(deck: Deck, world: World) -> Mesh:
    """Return the mesh of a deck that has neither servers nor models on dedicated ranks. Collective.

    Raises:
        HpctrainError: On all ranks if the deck does not fit the world, or has such ranks.
    """
    if deck.communication.server is not None:
        sentence = 'is supported by `hpctrain run` and `hpctrain resume` only (expected "none" here)'
        raise HpctrainError(deck.problem("communication.server.mode", sentence))
    require_no_dedicated_ranks(deck, "is supported by `hpctrain run` and `hpctrain resume` only")
    transport = choose_link(deck, world)
    return Mesh(world, axis_sizes(deck, world.size), transport=transport)


def choose_link(deck: Deck, world: World) -> str:
    """Set up the world's communication by the deck, and return the name of its transport. Collective.

    This includes emulated nodes and links, and audits of messages.
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
    """Decide where the layers of a deck with a known vocabulary go. Collective; may measure layers."""
    assert deck.model.vocabulary is not None
    with world.agreement():
        saved_policy = make_saved_policy(deck, world)
        architecture = architecture_of(deck, deck.model.vocabulary)
    groups = make_groups(deck, mesh, saved_policy, world.device)
    groups = extend_groups(groups, deck, world)
    placement = place_layers(deck, architecture, groups, mesh)
    schedule = placement.schedule_of(micro_batches(deck, mesh.size("data")))
    return EngineLayout(groups, architecture, placement, schedule)


def build_engine(deck: Deck, world: World, mesh: Mesh, roughness: float = 0.0) -> Engine:
    """Build the engine of a deck with a known vocabulary, initialized from the seed. Collective.

    Args:
        deck: The deck.
        world: All ranks of the engine.
        mesh: Arrangement of the ranks.
        roughness: Deviation of the noise that is added to biases and norm weights, for tests of layouts.
    """
    deck = choose_kernels(deck, world, mesh)
    return assemble(deck, world, mesh, arrange(deck, world, mesh), roughness)


def assemble(
    deck: Deck,
    world: World,
    mesh: Mesh,
    arrangement: EngineLayout,
    roughness: float = 0.0,
    build: StageBuilder = build_trained_stage,
) -> Engine:
    """Build the engine of a deck from its arrangement. Collective.

    Args:
        deck: The deck, with its choice of kernels.
        world: All ranks of the engine.
        mesh: Arrangement of the ranks.
        arrangement: Result of `arrange` for this deck.
        roughness: As in `build_engine`.
        build: Function that builds the stage.
    """
    groups, architecture, schedule = arrangement.groups, arrangement.architecture, arrangement.schedule
    number, split = mesh.coordinate("pipeline"), arrangement.placement.split
    models = build_parts(architecture, groups, layer_ranges(schedule, split, number))
    check_patterns(deck, architecture)
    freeze_parameters(models, deck.model.frozen)
    replications = make_replications(deck, mesh)
    offload = OffloadSettings()
    if {deck.memory.optimizer, deck.memory.parameters} != {"device"}:
        planned = PlannedMesh(mesh.sizes, number, world.topology.ranks_per_node)
        stage = plan_stage(
            deck, architecture, planned, PipelinePosition(schedule, split, number), world.device
        )
        offload = open_offload(deck, world, offloaded_bytes(deck, stage))
    with world.agreement():
        objective = make_objective(deck)
        setup = StageSetup(groups, models, replications, world.device, offload, world.agreement)
        stage = build(deck, setup)
    initialize(world, architecture, stage, deck.run.seed, roughness)
    stage.outer.begin(stage.optimizer)
    start_features(stage, deck, world)
    activation_files = open_activation_store(deck, world, groups.saved_policy, models, schedule, number)
    positions = context_positions(groups.context, groups.context_form, architecture.sequence)
    return Engine(
        world=world,
        mesh=mesh,
        architecture=architecture,
        stage=stage,
        objective=objective,
        control=UpdateControl.of(deck),
        placement=arrangement.placement,
        schedule=schedule,
        positions=positions.to(world.device),
        offload=offload.introduction,
        scratch=[each for each in (offload.scratch, activation_files) if each is not None],
    )
