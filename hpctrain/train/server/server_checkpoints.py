"""The checkpoints of a run with servers: these write and read them, and the workers wait."""

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
    """Checkpoints on all ranks of `world`, of the engine that the servers have together.

    They hold what those of any run hold, under the same names: whoever goes on has other workers and servers,
    or none.
    """

    def __init__(
        self, deck: Deck, engine: Engine, known: Mapping[str, Any], world: World, roles: ServerRoles
    ) -> None:
        super().__init__(deck, engine, known)
        self.whole, self.serves = world, roles.serves(world.rank)
        self.layout |= {"data": roles.workers, "zero": 0, "servers": roles.servers}
        self.provenance = self.provenance.of(world.size, self.layout)

    def expected_bytes(self) -> float:
        """See Checkpoints; 0 on workers."""
        return super().expected_bytes() if self.serves else 0.0

    @override
    def save(self, state: TrainState) -> None:
        # What goes wrong the servers agree on among themselves before all ranks do.
        with self.whole.agreement():
            if self.serves:
                super().save(state)
        self._step = state.step

    def nonfinite_weight(self) -> NonFiniteWeight | None:
        """Return the first weight of the servers that is not finite, on all ranks."""
        weight = super().nonfinite_weight() if self.serves else None
        shared: NonFiniteWeight | None = self.whole.everyone.broadcast_object(weight, HEAD)
        return shared

    @override
    def restore(self, path: Path) -> TrainState:
        state: TrainState | None = None
        with self.whole.agreement():
            if self.serves:
                state = super().restore(path)
        own = None if state is None else (asdict(state), self.best.stored())
        shared, best = self.whole.everyone.broadcast_object(own, HEAD)
        self.best.resume(best)
        self.newest = path
        if path.parent == self.folder:
            self._step = int(shared["step"])
        return TrainState(**shared)

    def start_from(self, deck: Deck) -> str:
        """As `start_from_source`. Collective."""
        sentence = ""
        with self.whole.agreement():
            if self.serves:
                sentence = start_from_source(deck, self.engine)
        return sentence

    @override
    def stored(self, state: TrainState) -> dict[str, Any]:
        return {**super().stored(state), "ranks": self.whole.size}
