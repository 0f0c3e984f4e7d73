"""Construction of what a stage is built from: model parts, groups, and memory outside the device."""

from __future__ import annotations

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.planned import PlannedMesh
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.engine.choices.offload_allocators import OffloadAllocators, open_offload
from hpctrain.engine.layout.engine_spec import EngineSpec
from hpctrain.engine.name_patterns import check_patterns
from hpctrain.engine.stages.planned_stage import PipelinePosition, offloaded_bytes, plan_stage
from hpctrain.engine.stages.stage import StageSetup
from hpctrain.engine.stages.zero_groups import make_replications
from hpctrain.model.construction import build_parts
from hpctrain.model.parameters.frozen import freeze_parameters
from hpctrain.pipeline.split import layer_ranges


def make_setup(deck: Deck, world: World, mesh: Mesh, spec: EngineSpec) -> StageSetup:
    """Return what this rank's stage is built from: its model parts, without memory, and their groups.

    Collective over all ranks.

    Args:
        deck: The deck, with its choice of kernels.
        world: All ranks of the engine.
        mesh: Arrangement of the ranks.
        spec: Result of `make_engine_spec` for this deck.

    Raises:
        HpctrainError: On all ranks if the deck does not fit the model or the machine.
    """
    position = PipelinePosition(spec.schedule, spec.placement.split, mesh.coordinate("pipeline"))
    models = build_parts(spec.architecture, spec.layer_context, layer_ranges(*position))
    check_patterns(deck, spec.architecture)
    freeze_parameters(models, deck.model.frozen)
    replications = make_replications(deck, mesh)
    offload = OffloadAllocators()
    if {deck.memory.optimizer, deck.memory.parameters} != {"device"}:
        planned = PlannedMesh(mesh.sizes, position.number, world.topology.ranks_per_node)
        stage = plan_stage(deck, spec.architecture, planned, position, world.device)
        offload = open_offload(deck, world, offloaded_bytes(deck, stage))
    return StageSetup(spec.layer_context, models, replications, world.device, offload, world.agreement)
