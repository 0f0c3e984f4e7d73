"""Roles of ranks in a run with parameter servers.

Servers hold slices of the parameters and the optimizer state. Workers compute gradients of the whole model;
servers reduce them and update the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.server import server_ranks
from hpctrain.engine.layout.run_mesh import configure_communication
from hpctrain.engine.stages.stage import (
    StageBuilder,
    StageSetup,
    TrainedStage,
    build_stage,
    build_trained_stage,
)
from hpctrain.engine.stages.update_rules import RULES
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.optim.optimizer import IdleOptimizer
from hpctrain.sharding.reducer import Reducer, UnreducedGradients
from hpctrain.sharding.replica_sync import SyncEveryStep
from hpctrain.sharding.synchronize import GradientSynchronizer


def build_worker_stage(deck: Deck, setup: StageSetup) -> TrainedStage:
    """Build the stage of a worker, whose gradients servers reduce. It is a StageBuilder."""
    stage = build_stage(deck, setup.layer_context, setup.models, setup.replications, has_gradients=True)
    replica_sync = SyncEveryStep()
    reducers = [Reducer(bucket, UnreducedGradients()) for bucket in stage.buckets]
    synchronizer = GradientSynchronizer(reducers, replica_sync)
    rule = RULES[deck.optimizer.name](deck)
    assert not isinstance(rule, MatrixRules)
    return TrainedStage(
        **vars(stage),
        synchronizer=synchronizer,
        replica_sync=replica_sync,
        optimizer=IdleOptimizer(rule=rule),
        state_owners=[],
    )


@dataclass(frozen=True)
class ServerRoles:
    """Numbers of servers and workers. The first ranks of a world are the servers."""

    servers: int
    workers: int

    @staticmethod
    def of(deck: Deck, ranks: int) -> ServerRoles:
        """Return the roles of a deck on a number of ranks."""
        return ServerRoles(server_ranks(deck), ranks - server_ranks(deck))

    def serves(self, rank: int) -> bool:
        """Return True if a rank is a server."""
        return rank < self.servers

    def split_world(self, deck: Deck, world: World) -> tuple[Deck, World, Mesh]:
        """Return the deck, the world and the mesh of the ranks with this rank's role. Collective."""
        ranks = range(self.servers) if self.serves(world.rank) else range(self.servers, world.size)
        role_deck = server_deck(deck) if self.serves(world.rank) else deck
        transport = configure_communication(deck, world)
        part = world.subworld(ranks)
        return role_deck, part, Mesh(part, {"data": part.size}, transport)

    def stage_builder(self, rank: int) -> StageBuilder:
        """Return the function that builds the stage of a rank."""
        return build_trained_stage if self.serves(rank) else build_worker_stage


def server_deck(deck: Deck) -> Deck:
    """Return the deck of the servers, which hold the model in slices (ZeRO)."""
    return deck.with_keys(
        layout={"zero": 3 if server_ranks(deck) > 1 else 2},
        memory={"keep_gathered": 0, "accumulate": "whole"},
    )
