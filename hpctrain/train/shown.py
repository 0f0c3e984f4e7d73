"""An engine whose model is only looked at: its parameters on any layout, without gradients or optimizer."""

from __future__ import annotations

from math import prod
from pathlib import Path

from hpctrain.comm.host_memory import resident_bytes
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck, Machine
from hpctrain.engine.build import Engine, arrange, assemble, make_mesh
from hpctrain.engine.shown import build_shown_stage
from hpctrain.engine.stage import load_parameters
from hpctrain.model.architecture import Architecture
from hpctrain.model.build import bare_model
from hpctrain.model.part import parameter_list
from hpctrain.model.precision import Precision
from hpctrain.plan.room import demand_room


def shown_engine(path: Path, deck: Deck, world: World) -> Engine:
    """The model of a checkpoint, laid out by a deck of it whose vocabulary is settled. Collective.

    HpctrainError on all ranks where these cannot have it; else errors as in `checkpoint.read.load`.
    """
    world.ledger.activity = "loading the model"
    mesh = make_mesh(deck, world)
    arrangement = arrange(deck, world, mesh)
    own = _elements(arrangement.architecture, deck, mesh) * Precision.of(deck).storage.itemsize
    demand_room(
        world, Machine(), str(path), resident_bytes() + own, lambda _: "more nodes would share the model"
    )
    engine = assemble(deck, world, mesh, arrangement, build=build_shown_stage)
    load_parameters(path, engine, world.everyone)
    return engine


def _elements(architecture: Architecture, deck: Deck, mesh: Mesh) -> int:
    """About how many of the model's parameters a rank has."""
    total = 0.0
    for parameter in parameter_list(bare_model(architecture)):
        shard = parameter.shard
        axes = ["pipeline", *shard.split]
        if deck.layout.zero == 3:
            axes += ["expert_data"] if "expert" in shard.split else ["data", "context"]
        total += prod(shard.shape) / prod(map(mesh.size, axes))
    return round(total)
