"""Construction of a model that generates text: its layout, its mesh and its stage, without weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from hpctrain.comm.mesh import Mesh, transport_elsewhere
from hpctrain.comm.planned import META, PlannedMesh
from hpctrain.comm.world import World
from hpctrain.deck.generation_deck import generation_deck
from hpctrain.deck.schema import Deck
from hpctrain.engine.choices.deck_layer_context import make_layer_context
from hpctrain.engine.choices.function_choice import choose_functions, with_planned_functions
from hpctrain.engine.mesh_sizes import expert_split
from hpctrain.engine.stages.stage import Stage, build_stage
from hpctrain.host.device import on_host
from hpctrain.model.construction import build_parts, initialize_parts
from hpctrain.model.modules.module_architecture import ModuleArchitecture
from hpctrain.model.modules.module_part import ModulePart
from hpctrain.model.part import LayerRange
from hpctrain.model.shape import ModelShape
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.backward.saved_policy import SavedPolicy
from hpctrain.pipeline.split import even_split
from hpctrain.sharding.replication import MeshQueries, Replications


def generation_stage(deck: Deck, world: World, tensor: int, pipeline: int = 1) -> tuple[Transformer, Stage]:
    """Return this rank's part of a transformer for generation, and its stage. Collective over all ranks.

    It has no gradients, and no weights until `load_parameters` or a WeightTransfer fills them in. It uses the
    kernels of the deck, and compiles functions if the deck asks for them and has none yet.

    Args:
        deck: Deck of the model, with a known vocabulary.
        world: All ranks.
        tensor: Number of tensor ranks.
        pipeline: Number of pipeline stages. `pipeline x tensor` ranks share a copy of the model.

    Raises:
        HpctrainError: On all ranks, as in `generation_deck`.
    """
    assert deck.model.vocabulary is not None and world.size % (pipeline * tensor) == 0
    with world.agreement():
        deck = generation_deck(deck, tensor, pipeline)
    if all(world.everyone.all_gather_object(on_host(world.device))):
        deck = choose_functions(deck, world)
    mesh = _mesh(deck, world, tensor, pipeline)
    return _stage(deck, mesh, world.device, mesh.coordinate("pipeline"), pipeline)


def module_generation_stage(deck: Deck, world: World) -> tuple[ModulePart, Stage]:
    """Return a module for generation, of which every rank has all, and its stage. Collective over all ranks.

    It has no gradients, and no weights until `load_parameters` fills them in. Buffers that are not stored
    have their values.

    Args:
        deck: Deck of a model of `transformers`, with a known vocabulary.
        world: All ranks.

    Raises:
        HpctrainError: On all ranks, as in `generation_deck`.
    """
    with world.agreement():
        deck = generation_deck(deck, 1)
        architecture = replace(ModuleArchitecture.of(deck), loaded=True)
    mesh = _mesh(deck, world, 1, 1)
    layer_context = make_layer_context(deck, mesh, SavedPolicy(), world.device)
    (model,) = build_parts(architecture, layer_context, [LayerRange.all_of(architecture.block_count)])
    assert isinstance(model, ModulePart)
    stage = build_stage(deck, layer_context, [model], Replications.unsharded(mesh))
    with world.agreement():
        initialize_parts(architecture, [model], (), deck.run.seed)
    return model, stage


def plan_generation_stage(
    deck: Deck, ranks: int, tensor: int, ranks_per_node: int, device: torch.device
) -> tuple[Transformer, Stage]:
    """Return what `generation_stage` returns on a number of ranks with one pipeline stage, without memory.

    Local.
    """
    deck = with_planned_functions(generation_deck(deck, tensor))
    mesh = PlannedMesh(_sizes(deck, ranks, tensor, 1), 0, ranks_per_node, device=device)
    with META:
        return _stage(deck, mesh, device)


def _mesh(deck: Deck, world: World, tensor: int, pipeline: int) -> Mesh:
    """Make the mesh of a model that generates text. Collective."""
    transport = transport_elsewhere(deck.communication.requested_transport)
    return Mesh(world, _sizes(deck, world.size, tensor, pipeline), transport)


def _sizes(deck: Deck, ranks: int, tensor: int, pipeline: int) -> dict[str, int]:
    sizes = {"pipeline": pipeline, "data": ranks // (pipeline * tensor), "context": 1, "tensor": tensor}
    return sizes | expert_split(deck)


def _stage(
    deck: Deck, mesh: MeshQueries, device: torch.device, number: int = 0, pipeline: int = 1
) -> tuple[Transformer, Stage]:
    """Return stage `number` of a pipeline."""
    layer_context = make_layer_context(deck, mesh, SavedPolicy(), device)
    assert deck.model.vocabulary is not None
    shape = ModelShape.of(deck, deck.model.vocabulary)
    blocks, last = even_split(shape.layers, pipeline), pipeline - 1
    first = sum(blocks[:number])
    ends = min(2, pipeline)
    span = LayerRange(
        first, first + blocks[number], number == 0, number == last, int(number == last > 0), ends
    )
    (model,) = build_parts(shape, layer_context, [span])
    assert isinstance(model, Transformer)
    return model, build_stage(deck, layer_context, [model], Replications.unsharded(mesh))
