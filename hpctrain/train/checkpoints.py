"""The checkpoints of a run: what is stored, when they are kept, and how a run gets its state back."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain import __version__
from hpctrain.checkpoint.entries import training_entries
from hpctrain.checkpoint.keep import checkpoint_path, keep, newest_good
from hpctrain.checkpoint.layout import Entry
from hpctrain.checkpoint.provenance import Provenance
from hpctrain.checkpoint.read import load, read_state
from hpctrain.checkpoint.write import save
from hpctrain.comm.world import World
from hpctrain.deck.read import deck_text
from hpctrain.deck.schema import Deck
from hpctrain.errors import InputOutputError
from hpctrain.train.build import Engine
from hpctrain.train.step import TrainState


class Checkpoints:
    """Writes the state of an engine into the folder of a run, and reads it."""

    def __init__(self, deck: Deck, engine: Engine, tokenizer: str) -> None:
        """`deck` is resolved; `tokenizer` is the text of the token file's tokenizer."""
        self.deck, self.engine, self.tokenizer = deck, engine, tokenizer
        self.folder = Path(deck.run.dir) / "checkpoints"
        self.newest: Path | None = None
        layout = {**engine.mesh.sizes, "zero": deck.layout.zero}
        self.provenance = Provenance(deck.run.title, deck.run.dir, layout, engine.world.size)

    def save(self, state: TrainState) -> None:
        """Write a checkpoint of the present state and forget those beyond `checkpoint.keep`. Collective."""
        world = self.engine.world
        path = checkpoint_path(self.folder, state.step)
        started = time.perf_counter()
        world.ledger.phase = "checkpoint"
        save(path, world.everyone, self._entries(writing=True), self._stored(state))
        keep(self.folder, self.deck.checkpoint.keep, world.everyone)
        world.ledger.phase = "step"
        self.newest = path
        log = logging.getLogger("hpctrain")
        log.info("checkpoint %s written in %.2f s", path, time.perf_counter() - started)

    def restore(self, path: Path) -> TrainState:
        """Read parameters, moments and state of a checkpoint that any number of ranks wrote. Collective."""
        engine = self.engine
        state = read_state(path, engine.world.everyone)
        load(path, engine.world.everyone, self._entries())
        engine.optimizer.publish()
        engine.optimizer.updates = int(state["updates"])
        if engine.loss_scale.window:
            engine.loss_scale.value = float(state["loss_scale"])
            engine.loss_scale.good_steps = int(state["loss_scale_good_steps"])
        self.provenance.go_on(state, path)
        self.newest = path
        return TrainState(**{key: int(state[key]) for key in asdict(TrainState())})

    def _entries(self, writing: bool = False) -> list[Entry]:
        engine = self.engine
        return training_entries(engine.buckets, engine.optimizer.moments, engine.mesh, writing)

    def _stored(self, state: TrainState) -> dict[str, Any]:
        """What the file holds besides tensors."""
        engine = self.engine
        return {
            **asdict(state),
            "updates": engine.optimizer.updates,
            "loss_scale": engine.loss_scale.value,
            "loss_scale_good_steps": engine.loss_scale.good_steps,
            "deck": deck_text(self.deck),
            "split": list(engine.placement.split),
            "tokenizer": self.tokenizer,
            "ranks": engine.world.size,
            "code_version": __version__,
            **self.provenance.stored(state.step),
        }


def find_checkpoint(world: World, target: Path) -> Path:
    """The checkpoint meant by a file, or by a run's folder: the newest good one."""
    with world.agreement():
        if not target.exists():
            raise InputOutputError(f"{target}: no such run folder or checkpoint")
    if not target.is_dir():
        return target
    path, warnings = newest_good(target / "checkpoints", world.everyone)
    if world.rank == 0:
        for warning in warnings:
            logging.getLogger("hpctrain").warning("%s", warning)
    if path is None:
        raise InputOutputError(f"{target / 'checkpoints'}: holds no good checkpoint to go on from")
    return path
