"""Construction of what a stage is built from: model parts, groups, and memory outside the device."""

from __future__ import annotations

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.planned import PlannedMesh
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.engine.arrangement import EngineLayout
from hpctrain.engine.name_patterns import check_patterns
from hpctrain.engine.offload_settings import OffloadSettings, open_offload
from hpctrain.engine.planned_stage import PipelinePosition, offloaded_bytes, plan_stage
from hpctrain.engine.stage import StageSetup
from hpctrain.engine.zero_groups import make_replications
from hpctrain.model.construction import build_parts
from hpctrain.model.frozen import freeze_parameters
from hpctrain.pipeline.split import layer_ranges


def make_setup(deck: Deck, world: World, mesh: Mesh, layout: EngineLayout) -> StageSetup:
    """Return what this rank's stage is built from: its model parts, without memory, and their groups.

    Collective over all ranks.

    Args:
        deck: The deck, with its choice of kernels.
        world: All ranks of the engine.
        mesh: Arrangement of the ranks.
        layout: Result of `arrange` for this deck.

    Raises:
        HpctrainError: On all ranks if the deck does not fit the model or the machine.
    """
    position = PipelinePosition(layout.schedule, layout.placement.split, mesh.coordinate("pipeline"))
    models = build_parts(layout.architecture, layout.layer_context, layer_ranges(*position))
    check_patterns(deck, layout.architecture)
    freeze_parameters(models, deck.model.frozen)
    replications = make_replications(deck, mesh)
    offload = OffloadSettings()
    if {deck.memory.optimizer, deck.memory.parameters} != {"device"}:
        planned = PlannedMesh(mesh.sizes, position.number, world.topology.ranks_per_node)
        stage = plan_stage(deck, layout.architecture, planned, position, world.device)
        offload = open_offload(deck, world, offloaded_bytes(deck, stage))
    return StageSetup(layout.layer_context, models, replications, world.device, offload, world.agreement)
