"""The checkpoints of a run: what is stored, when they are kept, and how a run gets its state back."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain import __version__
from hpctrain.checkpoint.agree import raise_on_all_ranks
from hpctrain.checkpoint.background import BackgroundSave
from hpctrain.checkpoint.checkpoint_index import AUXILIARY_MODELS, examine
from hpctrain.checkpoint.copy_on_write import HostBuffer
from hpctrain.checkpoint.draft import PIECE_BYTES
from hpctrain.checkpoint.finite import NonFiniteWeight, nonfinite_weight, require_finite
from hpctrain.checkpoint.load import in_types, load
from hpctrain.checkpoint.names import BEST, checkpoint_path
from hpctrain.checkpoint.provenance import Provenance
from hpctrain.checkpoint.retention import (
    delete_old_checkpoints,
    is_complete,
    log_io_errors,
    remove_link,
    try_point_to,
)
from hpctrain.checkpoint.save import needs_mpi, save
from hpctrain.checkpoint.state_entries import resumed_entries, stored_replicas, training_entries
from hpctrain.checkpoint.state_snapshots import SnapshotHistory, StateSnapshot
from hpctrain.checkpoint.stored_deck import deck_state, stored_deck
from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.engine.built_engine import Engine
from hpctrain.errors import InputOutputError
from hpctrain.sharding.bucket import await_readers
from hpctrain.sharding.state import MODEL, OPTIMIZER
from hpctrain.train.best import RECORD, BestSoFar
from hpctrain.train.frozen_change import frozen_change
from hpctrain.train.hook import Hook, StepDone
from hpctrain.train.resume_check import replaced_optimizer_state
from hpctrain.train.start import left_bias
from hpctrain.train.step import TrainState
from hpctrain.train.stored_choices import computed_by


class Checkpoints(Hook):
    """Writes the state of the engines of a run into its folder, and reads it."""

    def __init__(
        self, deck: Deck, engine: Engine, known: Mapping[str, Any], world: World | None = None
    ) -> None:
        """`deck` is resolved; `known` is what the files tell of the tokens that are trained on; `world` are
        the run's ranks, where those of its engine are not all.

        `heeded` will be sentences of what was noticed of a checkpoint that was read, on all ranks.
        """
        self.deck, self.engine, self.known = deck, engine, known
        self.world = engine.world if world is None else world
        self.folder = Path(deck.run.dir) / "checkpoints"
        self.newest: Path | None = None
        self.heeded: list[str] = []
        self.best = BestSoFar(deck)
        self.longest = 0.0  # seconds from beginning to end of the slowest one so far
        replicas = {"replicas": deck.layout.replicas} if deck.layout.replicas > 1 else {}
        self.layout = {**engine.mesh.sizes, "zero": deck.layout.zero, **replicas}
        self.provenance = Provenance(
            deck.run.title,
            deck.run.dir,
            self.layout,
            self.world.size,
            deck.run.steps,
            computed_by(engine.stage.layer_context),
        )
        back = deck.stability.spike_back if deck.stability.spike == "rollback" else 0
        self.held = SnapshotHistory(deck.checkpoint.memory_every, back)
        self._buffer: HostBuffer | None = None
        self._pending: BackgroundSave | None = None
        self._held_up = 0.0
        self._began = 0.0
        self._step: int | None = None
        self._is_best = False

    @property
    def through_mpi(self) -> bool:
        """True if checkpoints are written through MPI's files."""
        return self.deck.checkpoint.mode != "background" and needs_mpi(self.world.everyone)

    @property
    def under_way(self) -> bool:
        """True if a checkpoint has been started and is not complete."""
        return self._pending is not None

    def expected_bytes(self) -> float:
        """About the size of one. Collective."""
        entries = training_entries(self.engine.state(), writing=True)
        here = sum(entry.values.nbytes / entry.copies for entry in entries)
        of_ranks: list[float] = self.world.everyone.all_gather_object(here)
        return sum(of_ranks)

    def has(self, step: int) -> bool:
        """Return True if the newest checkpoint of the run, complete or not, is of this step."""
        return self._step == step

    def save(self, state: TrainState) -> None:
        """Write a checkpoint of the present state, or begin to; what another one still lacks comes first.

        Collective, as all methods.
        """
        self.finish()
        self._began, self._step = time.perf_counter(), state.step
        self._is_best = self.best.wants(state.step)
        engine, checkpoint = self.engine, self.deck.checkpoint
        path, everyone = checkpoint_path(self.folder, state.step), self.world.everyone
        entries = training_entries(engine.state(), writing=True)
        stored = self.stored(state)
        with self._timed():
            if checkpoint.mode == "background":
                if self._buffer is None:
                    self._buffer = HostBuffer(checkpoint.buffer, engine.world.device)
                self._pending = BackgroundSave(path, everyone, entries, stored, self._buffer)
                return
            save(path, everyone, entries, stored, min(PIECE_BYTES, checkpoint.buffer))
        self._saved(path)

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:  # noqa: ARG002
        """Store first what the checkpoint under way still needs of what forward and backward change."""
        if self._pending is not None:
            with self._timed():
                self._pending.protect(update=False)
        yield

    def before_update(self) -> None:
        """Store first what the checkpoint under way still needs of parameters and moments."""
        if self._pending is not None:
            with self._timed():
                self._pending.protect()

    def told_of_step(self, done: StepDone) -> None:
        """Note the step for the history."""
        self.provenance.record(done.state.step, done.result.loss, done.result.grad_norm)

    def after_step(self, done: StepDone) -> None:
        """Note the step for the history, and complete the checkpoint under way if it can be."""
        self.told_of_step(done)
        self.poll()

    def due(self, step: int) -> bool:
        """Return True if the deck asks for a checkpoint after a step."""
        every = self.deck.checkpoint.every
        return step == self.deck.run.steps or (every > 0 and step % every == 0)

    def lacks_best(self, step: int) -> bool:
        """Return True if the state after a step is the best so far and has no checkpoint."""
        return self.best.wants(step) and not self.has(step)

    def poll(self, wait: bool = False) -> None:
        """Complete the checkpoint under way if all ranks have written theirs; call it between steps."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with self._timed():
            complete = pending.poll(wait)
        if complete:
            self._saved(pending.path)
        else:
            self._pending = pending

    def finish(self) -> None:
        """Wait for the checkpoint under way, if there is one."""
        self.poll(wait=True)

    def doubt(self, step: int) -> None:
        """What is under way of the state after `step`, which has changed wrongly since, will not be there."""
        if self._pending is not None and self._step == step:
            self._pending.abandon()
            self._pending = self._step = None

    def nonfinite_weight(self) -> NonFiniteWeight | None:
        """Return the first weight, of those that a checkpoint would hold now, that is not finite."""
        entries = training_entries(self.engine.state(), writing=True)
        return nonfinite_weight(self.world.everyone, entries)

    def hold(self, state: TrainState) -> None:
        """Keep a copy of the present state in memory, if one is due."""
        if self.held.due(state.step):
            self.held.take(state.step, self.engine.state(), self.stored(state))

    def give_back(self, held: StateSnapshot) -> TrainState:
        """Have all state be again what it was when a copy of it was made."""
        tensors = list(self.engine.state())
        await_readers(self.engine.stage.buckets)
        held.restore(tensors)
        replicas = next((each.shard.shape[0] for each in tensors if each.per_replica), 0)
        return self._resume(held.stored, replicas, f"memory, step {held.step}")

    def restore(self, path: Path) -> TrainState:
        """Read parameters, moments and state of a checkpoint that any number of ranks wrote.

        HpctrainError on all ranks where another optimizer did, and this one is not to begin anew;
        InputOutputError where the file does not tell how far the run had come.
        """
        engine = self.engine
        structure = examine(path, self.world.everyone)
        state = structure.state
        if missing := [key for key in asdict(TrainState()) if key not in state]:
            raise InputOutputError(f"{path}: damaged: its state lacks {missing[0]}")
        before = stored_deck(state, path)
        wanted = list(engine.state())
        if anew := replaced_optimizer_state(self.deck, before, path):
            wanted = [tensor for tensor in wanted if not tensor.kind.startswith(OPTIMIZER)]
            self.heeded = [f"{path}: holds {anew}; {self.deck.optimizer.name} starts with new state"]
        entries, left = resumed_entries(wanted, structure.datasets)
        await_readers(engine.stage.buckets)
        kinds = {name: stored.kind for name, stored in structure.datasets.items()}
        adapted = {MODEL} if self.deck.model.adapters is not None else set[str]()

        def kind(entry: TensorRange) -> str:
            return kinds.get(entry.dataset, entry.kind) if adapted else entry.kind

        with in_types(entries, kind) as found:
            load(structure, self.world.everyone, found, left=left | adapted)
            remedy = "resume from an earlier checkpoint with `hpctrain resume CHECKPOINT`, or start again"
            require_finite(self.world.everyone, path, found, remedy)
        # State of frozen parameters is not used; a sentence about them follows.
        _, unsuitable = resumed_entries(
            (tensor for tensor in wanted if tensor.resume_mode != "never"), structure.datasets
        )
        for kind in sorted(set().union(*self.world.everyone.all_gather_object(sorted(unsuitable)))):
            self.heeded.append(f"{path}: part of its {kind} does not fit this run and is initialized")
        self.heeded += frozen_change(self.deck, before, path, engine.architecture)
        if sentence := left_bias(self.deck, before, path):
            self.heeded.append(sentence)
        self.newest = path
        if path.parent == self.folder:
            self._step = int(state["step"])
        return self._resume(state, stored_replicas(structure.datasets), str(path), bool(anew))

    def _resume(self, state: Mapping[str, Any], replicas: int, origin: str, anew: bool = False) -> TrainState:
        """Go on with what is there besides tensors, which are there by now; `replicas` were stored apart."""
        _resume_engine(self.engine, state, replicas, anew)
        for name, engine in self.engine.auxiliary_engines.items():
            _resume_engine(engine, state[AUXILIARY_MODELS][name], replicas, anew)
        self.provenance.continue_from(state, origin)
        self.best.resume(state.get(RECORD))
        self._find_best()
        # Checkpoints of earlier versions do not have all counters.
        return TrainState(**{key: int(state.get(key, 0)) for key in asdict(TrainState())})

    def _find_best(self) -> None:
        """Have the link `best` lead to the best one so far of a run that goes on, if it is there."""
        if not self.best.keeps:
            return
        path, everyone = checkpoint_path(self.folder, self.best.kept), self.world.everyone
        if everyone.broadcast_object(_holds(path, self.best.record()) if everyone.rank == 0 else None):
            try_point_to(path, everyone, BEST)
            return
        if self.best.kept and self.newest is not None and self.newest.parent == self.folder:
            sentence = f"{path}: the best checkpoint is missing; the next evaluation sets a new best"
            self.heeded.append(sentence)
        self.best.lose()
        with raise_on_all_ranks(everyone):
            if everyone.rank == 0:
                remove_link(self.folder, BEST)

    def _saved(self, path: Path) -> None:
        """A checkpoint is complete: lead to it, and forget those beyond `checkpoint.keep`."""
        everyone, checkpoint = self.world.everyone, self.deck.checkpoint
        self.newest = path
        try_point_to(path, everyone)
        if self._is_best:
            try_point_to(path, everyone, BEST)
        with log_io_errors():
            delete_old_checkpoints(self.folder, checkpoint.keep, everyone, checkpoint.keep_every)
        self.longest = max(self.longest, time.perf_counter() - self._began)
        sentence = "checkpoint %s written; training paused for %.2f s"
        logging.getLogger("hpctrain").info(sentence, path, self._held_up)
        self._held_up = 0.0

    @contextmanager
    def _timed(self) -> Iterator[None]:
        ledger, started = self.world.ledger, time.perf_counter()
        phase, ledger.phase = ledger.phase, "checkpoint"
        try:
            yield
        finally:
            ledger.phase = phase
            self._held_up += time.perf_counter() - started

    def stored(self, state: TrainState) -> dict[str, Any]:
        """Return the content of a checkpoint without its tensors."""
        engine = self.engine
        companions = {name: _stored_engine(each) for name, each in engine.auxiliary_engines.items()}
        if self.world is not engine.world:  # others may have them
            told = self.world.everyone.all_gather_object(companions)
            companions = {name: each for some in told for name, each in some.items()}
        return {
            **asdict(state),
            **_stored_engine(engine),
            **({AUXILIARY_MODELS: companions} if companions else {}),
            **({RECORD: self.best.record()} if self.best.of else {}),
            **deck_state(self.deck),
            "split": list(engine.placement.split),
            "products": engine.stage.layer_context.products.kernels.stored_choices,
            "compiled": engine.stage.layer_context.functions.library_checksums,
            **self.known,
            "ranks": self.world.size,
            "code_version": __version__,
            **self.provenance.stored(state.step),
        }


def _stored_engine(engine: Engine) -> dict[str, Any]:
    """Return the state of an engine without its tensors."""
    return {
        "updates": engine.stage.optimizer.updates,
        "totals": engine.stage.optimizer.totals,
        "under_way": engine.stage.replica_sync.in_flight,
        "loss_scale": engine.control.loss_scale.value if engine.control.loss_scale.window else None,
        "loss_scale_good_steps": engine.control.loss_scale.good_steps,
        **engine.control.noise_scale.state(),
        **engine.control.spikes.state(),
    }


def _resume_engine(engine: Engine, state: Mapping[str, Any], replicas: int, anew: bool) -> None:
    """Have an engine, whose tensors are there, go on with the rest of its state."""
    engine.stage.optimizer.totals = {} if anew else state.get("totals") or {}
    engine.stage.optimizer.publish()
    engine.stage.optimizer.updates = 0 if anew else int(state["updates"])
    # By how many updates what is under way was begun, those that begin anew do not tell.
    under_way = {} if anew else state.get("under_way") or {}
    engine.stage.replica_sync.resume(engine.stage.optimizer, replicas, under_way)
    if engine.control.loss_scale.window and state["loss_scale"] is not None:
        engine.control.loss_scale.value = float(state["loss_scale"])
        engine.control.loss_scale.good_steps = int(state["loss_scale_good_steps"])
    engine.control.noise_scale.resume(state)
    engine.control.spikes.resume(state)
    engine.stage.synchronizer.end_step(
        True, engine.control.loss_scale.value / float(state.get("loss_scale") or 1.0)
    )


def _holds(path: Path, record: Mapping[str, Any]) -> bool:
    """Return True if a checkpoint is complete and belongs to the evaluation in the record."""
    if not record["kept"] or not is_complete(path):
        return False
    state, names = examine(path).state, ("of", "kept", "kept_loss")
    own = state.get(RECORD)
    same = isinstance(own, dict) and all(own.get(name) == record[name] for name in names)
    return same and state["step"] == record["kept"]
