"""An engine whose model is only looked at: its parameters on any layout, without gradients or optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch

from hpctrain.comm.host_memory import resident_bytes
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck, Machine
from hpctrain.engine.build import Engine, arrange, assemble, make_mesh
from hpctrain.engine.offload import Offload
from hpctrain.engine.stage import TrainedStage, build_stage, load_parameters
from hpctrain.model.architecture import Architecture
from hpctrain.model.build import bare_model
from hpctrain.model.part import Part, parameter_list
from hpctrain.model.precision import Precision
from hpctrain.optim.optimizer import Agreement, Optimizer
from hpctrain.parallel.groups import LayerGroups
from hpctrain.plan.room import demand_room
from hpctrain.sharding.outer import EveryStep
from hpctrain.sharding.replication import Replications
from hpctrain.sharding.synchronize import GradientSynchronizer


class NoOptimizer(Optimizer):
    """Of parameters that stay as they are."""

    updates = 0

    def __init__(self) -> None:
        super().__init__(None, (), ())

    def step(self, learning_rate: float, gradient_divisor: float) -> None:  # noqa: ARG002
        """There is nothing to update."""
        raise AssertionError("a model that is only looked at")


def shown_engine(path: Path, deck: Deck, world: World) -> Engine:
    """The model of a checkpoint, laid out by a deck of it whose vocabulary is settled. Collective.

    HpctrainError on all ranks where these cannot have it; else errors as in `checkpoint.read.load`.
    """
    mesh = make_mesh(deck, world)
    arrangement = arrange(deck, world, mesh)
    own = _elements(arrangement.architecture, deck, mesh) * Precision.of(deck).storage.itemsize
    demand_room(
        world, Machine(), str(path), resident_bytes() + own, lambda _: "more nodes would share the model"
    )
    engine = assemble(deck, world, mesh, arrangement, build=_build)
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


def _build(
    deck: Deck,
    groups: LayerGroups,
    models: Sequence[Part],
    replications: Replications,
    offload: Offload,  # noqa: ARG001
    device: torch.device,  # noqa: ARG001
    agreement: Agreement,  # noqa: ARG001
) -> TrainedStage:
    """In place of `build_trained_stage`."""
    stage, outer = build_stage(deck, groups, models, replications), EveryStep()
    nothing = GradientSynchronizer([], outer)
    return TrainedStage(
        **vars(stage), synchronizer=nothing, outer=outer, optimizer=NoOptimizer(), stateful=[stage.modules]
    )
