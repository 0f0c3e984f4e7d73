"""Checkpoints of a run with servers. The servers write and read them, and the workers wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from typing_extensions import override

from hpctrain.checkpoint.finite import NonFiniteWeight
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.engine.built_engine import Engine
from hpctrain.engine.layout.server_roles import ServerRoles
from hpctrain.train.checkpoints import Checkpoints
from hpctrain.train.server.server_messages import HEAD
from hpctrain.train.start import start_from_source
from hpctrain.train.step import TrainState


class ServedCheckpoints(Checkpoints):
    """Checkpoints of the engine that the servers share. All methods are collective over the run's ranks.

    The files have the same content as those of any run, so a run with other servers, or none, can resume.
    """

    def __init__(
        self, deck: Deck, engine: Engine, known: Mapping[str, Any], world: World, roles: ServerRoles
    ) -> None:
        super().__init__(deck, engine, known)
        self.run_world, self.serves = world, roles.serves(world.rank)
        self.layout |= {"data": roles.workers, "zero": 0, "servers": roles.servers}
        self.provenance.set_layout(world.size, self.layout)

    @override
    def expected_bytes(self) -> float:
        return super().expected_bytes() if self.serves else 0.0

    @override
    def save(self, state: TrainState) -> None:
        # The servers agree on an error among themselves, before all ranks do.
        with self.run_world.agreement():
            if self.serves:
                super().save(state)
        self._step = state.step

    @override
    def nonfinite_weight(self) -> NonFiniteWeight | None:
        weight = super().nonfinite_weight() if self.serves else None
        shared: NonFiniteWeight | None = self.run_world.everyone.broadcast_object(weight, HEAD)
        return shared

    @override
    def restore(self, path: Path) -> TrainState:
        state: TrainState | None = None
        with self.run_world.agreement():
            if self.serves:
                state = super().restore(path)
        of_server = None if state is None else (asdict(state), self.best.stored())
        shared, best = self.run_world.everyone.broadcast_object(of_server, HEAD)
        self.best.resume(best)
        self.newest = path
        if path.parent == self.folder:
            self._step = int(shared["step"])
        return TrainState(**shared)

    def start_from(self, deck: Deck) -> str:
        """Load the weights that `model.from` names on the servers. Return a sentence about them."""
        sentence = ""
        with self.run_world.agreement():
            if self.serves:
                sentence = start_from_source(deck, self.engine)
        return sentence

    @override
    def stored(self, state: TrainState) -> dict[str, Any]:
        return {**super().stored(state), "ranks": self.run_world.size}
