"""Ranks of two roles: servers, which own slices of parameters and optimizer state, and workers, which compute
gradients of a whole model and leave sums and updates to these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.work import Work
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.server import server_ranks
from hpctrain.engine.build import choose_link
from hpctrain.engine.offload_settings import OffloadSettings
from hpctrain.engine.rules import RULES
from hpctrain.engine.stage import TrainedStage, build_stage, build_trained_stage
from hpctrain.model.part import ModelPart
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.optim.optimizer import Agreement, Optimizer
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.sharding.reducer import make_reducer
from hpctrain.sharding.replica_sync import SyncEveryStep
from hpctrain.sharding.replication import Replications
from hpctrain.sharding.synchronize import GradientSynchronizer


class OwnGradients:
    """A Summation that leaves each rank its own: what servers add up."""

    scratch_bytes = 0

    def begin(self, updates: int) -> None:
        """Every step is like every other."""

    def start(self, gradients: Tensor, sums: Tensor) -> Work[Tensor]:
        """Start to sum the gradients of the bucket over the ranks of its group."""
        assert sums is gradients, "only what is not cut stays where it is"
        return Work(sums)

    def after_step(self, updated: bool, factor: float) -> None:
        """Nothing is left of it."""


class Elsewhere(Optimizer):
    """Stands for one that other ranks have: no state is here, and nothing is updated."""

    def __init__(self, deck: Deck) -> None:
        rule = RULES[deck.optimizer.name](deck)
        assert not isinstance(rule, MatrixRules)
        super().__init__(rule, [], [])
        self.updates = 0

    @override
    def step(self, learning_rate: float, gradient_divisor: float) -> None:
        raise AssertionError("servers update the parameters")


def build_worker_stage(
    deck: Deck,
    groups: LayerContext,
    models: Sequence[ModelPart],
    replications: Replications,
    offload: OffloadSettings,  # noqa: ARG001
    device: torch.device,  # noqa: ARG001
    agreement: Agreement = nullcontext,  # noqa: ARG001
) -> TrainedStage:
    """As `build_trained_stage`, of a worker."""
    stage = build_stage(deck, groups, models, replications, trained=True)
    outer = SyncEveryStep()
    reducers = [make_reducer(bucket, OwnGradients()) for bucket in stage.buckets]
    synchronizer = GradientSynchronizer(reducers, outer)
    return TrainedStage(
        **vars(stage), synchronizer=synchronizer, outer=outer, optimizer=Elsewhere(deck), stateful=[]
    )


@dataclass(frozen=True)
class ServerRoles:
    """The first `servers` ranks of a world serve, the `workers` others work."""

    servers: int
    workers: int

    @staticmethod
    def of(deck: Deck, ranks: int) -> ServerRoles:
        """Those of a deck on so many ranks."""
        return ServerRoles(server_ranks(deck), ranks - server_ranks(deck))

    def serves(self, rank: int) -> bool:
        """Whether a rank is a server."""
        return rank < self.servers

    def place(self, deck: Deck, world: World) -> tuple[Deck, World, Mesh]:
        """The deck of this rank's role, the world of the ranks that have it, and their mesh. Collective."""
        ranks = range(self.servers) if self.serves(world.rank) else range(self.servers, world.size)
        own = serving(deck) if self.serves(world.rank) else deck
        transport = choose_link(deck, world)
        part = world.subworld(ranks)
        return own, part, Mesh(part, {"data": part.size}, transport)

    def stage(self, rank: int) -> Callable[..., TrainedStage]:
        """What builds the stage of a rank."""
        return build_trained_stage if self.serves(rank) else build_worker_stage


def serving(deck: Deck) -> Deck:
    """The deck as its servers hold the model: slices of all, cut over them."""
    return deck.with_keys(
        layout={"zero": 3 if server_ranks(deck) > 1 else 2},
        memory={"keep_gathered": 0, "accumulate": "whole"},
    )
