"""Construction of an engine from a deck.

The order is: `make_mesh` arranges the ranks, `make_engine_spec` decides where layers go, and `assemble`
builds the model, its buckets, the optimizer and what belongs to them. `build_engine` does the last two.
"""

from __future__ import annotations

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.engine.built_engine import Engine
from hpctrain.engine.choices.activation_policy import open_activation_store
from hpctrain.engine.choices.kernel_choice import choose_kernels
from hpctrain.engine.layout.engine_spec import EngineSpec, make_engine_spec
from hpctrain.engine.registry import start_features
from hpctrain.engine.stage_setup import make_setup
from hpctrain.engine.stage_values import initialize
from hpctrain.engine.stages.stage import StageBuilder, build_trained_stage
from hpctrain.engine.update_control import UpdateControl
from hpctrain.objective.factory import make_objective
from hpctrain.parallel.sequence import context_positions


def build_engine(deck: Deck, world: World, mesh: Mesh, noise_std: float = 0.0) -> Engine:
    """Build the engine of a deck with a known vocabulary, initialized from the seed. Collective.

    Args:
        deck: The deck.
        world: All ranks of the engine.
        mesh: Arrangement of the ranks.
        noise_std: Standard deviation of noise that is added to biases and norm weights, which start as zeros
            and ones, so that tests notice if a layout permutes them. 0 in runs.
    """
    deck = choose_kernels(deck, world, mesh)
    return assemble(deck, world, mesh, make_engine_spec(deck, world, mesh), noise_std)


def assemble(
    deck: Deck,
    world: World,
    mesh: Mesh,
    spec: EngineSpec,
    noise_std: float = 0.0,
    build: StageBuilder = build_trained_stage,
) -> Engine:
    """Build the engine of a deck from its spec. Collective.

    Args:
        deck: The deck, with its choice of kernels.
        world: All ranks of the engine.
        mesh: Arrangement of the ranks.
        spec: Result of `make_engine_spec` for this deck.
        noise_std: As in `build_engine`.
        build: Function that builds the stage.
    """
    setup = make_setup(deck, world, mesh, spec)
    layer_context, architecture, schedule = spec.layer_context, spec.architecture, spec.schedule
    with world.agreement():
        objective = make_objective(deck)
        stage = build(deck, setup)
    initialize(world, architecture, stage, deck.run.seed, noise_std)
    stage.replica_sync.begin(stage.optimizer)
    start_features(stage, deck, world)
    activation_files = open_activation_store(
        deck, world, layer_context.saved_policy, setup.models, schedule, mesh.coordinate("pipeline")
    )
    positions = context_positions(layer_context.context, layer_context.context_form, architecture.sequence)
    return Engine(
        world=world,
        mesh=mesh,
        architecture=architecture,
        stage=stage,
        objective=objective,
        control=UpdateControl.of(deck),
        placement=spec.placement,
        schedule=schedule,
        positions=positions.to(world.device),
        offload_description=setup.offload.description,
        scratch=[each for each in (setup.offload.scratch, activation_files) if each is not None],
    )
