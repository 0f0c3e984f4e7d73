"""The checkpoints of a run: their content, when they are written and kept, and how they are restored."""

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
from hpctrain.comm.ledger import Ledger
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.engine.built_engine import Engine
from hpctrain.errors import InputOutputError
from hpctrain.sharding.bucket import await_readers
from hpctrain.sharding.state import MODEL, OPTIMIZER
from hpctrain.train.best_evaluation import RECORD, BestSoFar
from hpctrain.train.frozen_change import frozen_change
from hpctrain.train.hook import Hook, StepDone
from hpctrain.train.resume_check import replaced_optimizer_state
from hpctrain.train.start import dropped_bias_note
from hpctrain.train.step import TrainState
from hpctrain.train.stored_choices import computed_by


class Checkpoints(Hook):
    """Hook that writes the checkpoints of a run into its folder, and restores the state of the run from them.

    All methods are collective.

    Attributes:
        deck: The resolved deck.
        engine: The engine.
        extra_state: Further entries of the stored state, such as the description of the training data.
        world: All ranks of the run.
        folder: Folder of the checkpoints.
        newest: Newest complete checkpoint, if any.
        notes: Sentences for the user about the checkpoint that was restored.
        best: Lowest loss so far, which decides on the best checkpoint.
        longest: Seconds that the slowest checkpoint took from start to end.
        layout: Sizes of the mesh, stage of ZeRO and number of replicas.
        provenance: History of the run.
        snapshots: Copies of recent states in memory.
    """

    def __init__(
        self, deck: Deck, engine: Engine, extra_state: Mapping[str, Any], world: World | None = None
    ) -> None:
        self.deck, self.engine, self.extra_state = deck, engine, extra_state
        self.world = engine.world if world is None else world
        self.folder = Path(deck.run.dir) / "checkpoints"
        self.newest: Path | None = None
        self.notes: list[str] = []
        self.best = BestSoFar(deck)
        self.longest = 0.0
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
        self.snapshots = SnapshotHistory(deck.checkpoint.memory_every, back)
        self._buffer: HostBuffer | None = None
        self._pending: BackgroundSave | None = None
        self._paused_seconds = 0.0
        self._start_time = 0.0
        self._step: int | None = None
        self._is_best = False

    @property
    def through_mpi(self) -> bool:
        """True if checkpoints are written through MPI's files."""
        return self.deck.checkpoint.mode != "background" and needs_mpi(self.world.everyone)

    @property
    def is_writing(self) -> bool:
        """True if a checkpoint has been started and is not complete."""
        return self._pending is not None

    def expected_bytes(self) -> float:
        """Return the approximate size of a checkpoint, in bytes."""
        entries = training_entries(self.engine.state(), writing=True)
        here = sum(entry.values.nbytes / entry.copies for entry in entries)
        of_ranks: list[float] = self.world.everyone.all_gather_object(here)
        return sum(of_ranks)

    def has_newest(self, step: int) -> bool:
        """Return True if the newest checkpoint of the run, complete or not, is of this step."""
        return self._step == step

    def save(self, state: TrainState) -> None:
        """Write a checkpoint of the present state, or start to write it in the background.

        An unfinished checkpoint is completed first.
        """
        self.finish()
        self._start_time, self._step = time.perf_counter(), state.step
        self._is_best = self.best.is_best_checkpoint(state.step)
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
        """Copy what an unfinished checkpoint needs of the state that the passes of the step change."""
        if self._pending is not None:
            with self._timed():
                self._pending.protect(update=False)
        yield

    def before_update(self) -> None:
        """Copy what an unfinished checkpoint needs of the parameters and the optimizer state."""
        if self._pending is not None:
            with self._timed():
                self._pending.protect()

    def after_step_alone(self, done: StepDone) -> None:
        """Record the loss for the history."""
        self.provenance.record(done.state.step, done.result.loss, done.result.grad_norm)

    def after_step(self, done: StepDone) -> None:
        """Record the loss for the history, and complete an unfinished checkpoint if all ranks are ready."""
        self.after_step_alone(done)
        self.poll()

    def due(self, step: int) -> bool:
        """Return True if the deck asks for a checkpoint after a step."""
        every = self.deck.checkpoint.every
        return step == self.deck.run.steps or (every > 0 and step % every == 0)

    def lacks_best(self, step: int) -> bool:
        """Return True if the state after a step is the best so far and has no checkpoint."""
        return self.best.is_best_checkpoint(step) and not self.has_newest(step)

    def poll(self, wait: bool = False) -> None:
        """Complete an unfinished checkpoint if all ranks have written their parts (`wait`: wait for them)."""
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
        """Wait until an unfinished checkpoint is complete."""
        self.poll(wait=True)

    def abandon(self, step: int) -> None:
        """Discard an unfinished checkpoint of the state after `step`, since a fault has changed it."""
        if self._pending is not None and self._step == step:
            self._pending.abandon()
            self._pending = self._step = None

    def nonfinite_weight(self) -> NonFiniteWeight | None:
        """Return the first weight that is not finite; None if there is none."""
        entries = training_entries(self.engine.state(), writing=True)
        return nonfinite_weight(self.world.everyone, entries)

    def keep_snapshot(self, state: TrainState) -> None:
        """Copy the present state in memory, if a copy is due."""
        if self.snapshots.due(state.step):
            self.snapshots.take(state.step, self.engine.state(), self.stored(state))

    def restore_snapshot(self, snapshot: StateSnapshot) -> TrainState:
        """Restore the state from a copy in memory. Return the counters of the run."""
        tensors = list(self.engine.state())
        await_readers(self.engine.stage.buckets)
        snapshot.restore(tensors)
        replicas = next((each.shard.shape[0] for each in tensors if each.per_replica), 0)
        return self._resume(snapshot.stored, replicas, f"memory, step {snapshot.step}")

    def restore(self, path: Path) -> TrainState:
        """Restore the state from a checkpoint of any layout. Return the counters of the run.

        Raises:
            HpctrainError: The optimizer cannot use the stored state, and must not start anew.
            InputOutputError: The file is damaged.
        """
        engine = self.engine
        structure = examine(path, self.world.everyone)
        state = structure.state
        if missing := [key for key in asdict(TrainState()) if key not in state]:
            raise InputOutputError(f"{path}: damaged: its state lacks {missing[0]}")
        before = stored_deck(state, path)
        tensors = list(engine.state())
        if anew := replaced_optimizer_state(self.deck, before, path):
            tensors = [tensor for tensor in tensors if not tensor.kind.startswith(OPTIMIZER)]
            self.notes = [f"{path}: holds {anew}; {self.deck.optimizer.name} starts with new state"]
        entries, left = resumed_entries(tensors, structure.datasets)
        await_readers(engine.stage.buckets)
        kinds = {name: stored.kind for name, stored in structure.datasets.items()}
        adapted = {MODEL} if self.deck.model.adapters is not None else set[str]()

        def kind(entry: TensorRange) -> str:
            return kinds.get(entry.dataset, entry.kind) if adapted else entry.kind

        with in_types(entries, kind) as converted:
            load(structure, self.world.everyone, converted, left=left | adapted)
            remedy = "resume from an earlier checkpoint with `hpctrain resume CHECKPOINT`, or start again"
            require_finite(self.world.everyone, path, converted, remedy)
        # State of frozen parameters is not used; a sentence about them follows.
        _, unsuitable = resumed_entries(
            (tensor for tensor in tensors if tensor.resume_mode != "never"), structure.datasets
        )
        for kind in sorted(set().union(*self.world.everyone.all_gather_object(sorted(unsuitable)))):
            self.notes.append(f"{path}: part of its {kind} does not fit this run and is initialized")
        self.notes += frozen_change(self.deck, before, path, engine.architecture)
        if sentence := dropped_bias_note(self.deck, before, path):
            self.notes.append(sentence)
        self.newest = path
        if path.parent == self.folder:
            self._step = int(state["step"])
        return self._resume(state, stored_replicas(structure.datasets), str(path), bool(anew))

    def _resume(self, state: Mapping[str, Any], replicas: int, source: str, anew: bool = False) -> TrainState:
        """Restore everything except tensors, which are restored already.

        Args:
            state: State of the checkpoint.
            replicas: Number of diverged replicas in the checkpoint; 0 if it has one model.
            source: Description of the checkpoint.
            anew: True if the optimizer starts with new state.
        """
        _resume_engine(self.engine, state, replicas, anew)
        for name, engine in self.engine.auxiliary_engines.items():
            _resume_engine(engine, state[AUXILIARY_MODELS][name], replicas, anew)
        self.provenance.continue_from(state, source)
        self.best.resume(state.get(RECORD))
        self._find_best()
        # Checkpoints of earlier versions do not have all counters.
        return TrainState(**{key: int(state.get(key, 0)) for key in asdict(TrainState())})

    def _find_best(self) -> None:
        """Point the link `best` of a resumed run to its best checkpoint, or remove the link."""
        if not self.best.keeps:
            return
        path, everyone = checkpoint_path(self.folder, self.best.checkpoint_step), self.world.everyone
        if everyone.broadcast_object(_holds(path, self.best.stored()) if everyone.rank == 0 else None):
            try_point_to(path, everyone, BEST)
            return
        if self.best.checkpoint_step and self.newest is not None and self.newest.parent == self.folder:
            sentence = f"{path}: the best checkpoint is missing; the next evaluation sets a new best"
            self.notes.append(sentence)
        self.best.forget_checkpoint()
        with raise_on_all_ranks(everyone):
            if everyone.rank == 0:
                remove_link(self.folder, BEST)

    def _saved(self, path: Path) -> None:
        """Update the links when a checkpoint is complete, and delete old ones (`checkpoint.keep`)."""
        everyone, checkpoint = self.world.everyone, self.deck.checkpoint
        self.newest = path
        try_point_to(path, everyone)
        if self._is_best:
            try_point_to(path, everyone, BEST)
        with log_io_errors():
            delete_old_checkpoints(self.folder, checkpoint.keep, everyone, checkpoint.keep_every)
        self.longest = max(self.longest, time.perf_counter() - self._start_time)
        sentence = "checkpoint %s written; training paused for %.2f s"
        logging.getLogger("hpctrain").info(sentence, path, self._paused_seconds)
        self._paused_seconds = 0.0

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with checkpoint_phase(self.world.ledger):
                yield
        finally:
            self._paused_seconds += time.perf_counter() - start

    def stored(self, state: TrainState) -> dict[str, Any]:
        """Return the content of a checkpoint without its tensors."""
        engine = self.engine
        models = {name: _stored_engine(each) for name, each in engine.auxiliary_engines.items()}
        if self.world is not engine.world:  # auxiliary models may be on other ranks
            models_of_ranks = self.world.everyone.all_gather_object(models)
            models = {name: each for some in models_of_ranks for name, each in some.items()}
        return {
            **asdict(state),
            **_stored_engine(engine),
            **({AUXILIARY_MODELS: models} if models else {}),
            **({RECORD: self.best.stored()} if self.best.set_name else {}),
            **deck_state(self.deck),
            "split": list(engine.placement.split),
            "products": engine.stage.layer_context.products.kernels.stored_choices,
            "compiled": engine.stage.layer_context.functions.library_checksums,
            **self.extra_state,
            "ranks": self.world.size,
            "code_version": __version__,
            **self.provenance.stored(state.step),
        }


@contextmanager
def checkpoint_phase(ledger: Ledger) -> Iterator[None]:
    """Count the calls of the block in the phase "checkpoint" of the ledger."""
    phase, ledger.phase = ledger.phase, "checkpoint"
    try:
        yield
    finally:
        ledger.phase = phase


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
    """Restore the state of an engine except its tensors, which are restored already."""
    engine.stage.optimizer.totals = {} if anew else state.get("totals") or {}
    engine.stage.optimizer.copy_to_parameters()
    engine.stage.optimizer.updates = 0 if anew else int(state["updates"])
    # Update numbers of synchronizations in flight are meaningless if the count of updates starts anew.
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
    stored = state.get(RECORD)
    same = isinstance(stored, dict) and all(stored.get(name) == record[name] for name in names)
    return same and state["step"] == record["kept"]
