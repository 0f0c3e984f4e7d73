"""Inputs of an engine besides its deck: layer context, architecture, pipeline split and schedule."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.engine.choices.activation_policy import make_saved_policy
from hpctrain.engine.choices.deck_layer_context import make_layer_context
from hpctrain.engine.layout.layer_placement import LayerPlacement, place_layers
from hpctrain.engine.mesh_sizes import micro_batches
from hpctrain.engine.registry import extend_layer_context
from hpctrain.model.architecture import Architecture
from hpctrain.model.construction import architecture_of
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.pipeline.action import Schedule


@dataclass(frozen=True)
class EngineSpec:
    """Inputs of an engine besides its deck, which are made before any large memory is allocated.

    Attributes:
        layer_context: Context of the layers, with their groups and kernels.
        architecture: Architecture of the model.
        placement: Number of blocks of each pipeline part, and schedules for any number of micro-batches.
        schedule: Pipeline schedule of the deck's batch.
    """

    layer_context: LayerContext
    architecture: Architecture
    placement: LayerPlacement
    schedule: Schedule


def make_engine_spec(deck: Deck, world: World, mesh: Mesh) -> EngineSpec:
    """Return the spec of a deck with a known vocabulary. Collective; may measure layers."""
    assert deck.model.vocabulary is not None
    with world.agreement():
        saved_policy = make_saved_policy(deck, world)
        architecture = architecture_of(deck, deck.model.vocabulary)
    layer_context = make_layer_context(deck, mesh, saved_policy, world.device)
    layer_context = extend_layer_context(layer_context, deck, world)
    placement = place_layers(deck, architecture, layer_context, mesh)
    schedule = placement.schedule_of(micro_batches(deck, mesh.size("data")))
    return EngineSpec(layer_context, architecture, placement, schedule)
