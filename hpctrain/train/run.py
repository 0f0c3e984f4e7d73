"""The run: from a deck to a trained model with its checkpoints and metrics."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from hpctrain.audit.detected_fault import SilentFaultError
from hpctrain.checkpoint.load import read_state
from hpctrain.checkpoint.names import checkpoints
from hpctrain.checkpoint.stored_deck import require_trusted, stored_deck
from hpctrain.checkpoint.verify_checksums import verify
from hpctrain.comm.parallel_files import require_parallel_files
from hpctrain.comm.world import World
from hpctrain.data.corpus import Corpus, open_corpus, resolve_vocabulary
from hpctrain.data.held_out import HeldOut, open_held_out
from hpctrain.deck.check import check_world
from hpctrain.deck.code import trust_of
from hpctrain.deck.replicas import fit_continued_replicas, fit_initial_replicas
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.objective import REFERENCE_KINDS
from hpctrain.engine.choices.function_choice import choose_functions
from hpctrain.engine.layout.model_placement import place_models
from hpctrain.errors import EXIT_AGAIN, EXIT_DONE, EXIT_USER, HpctrainError
from hpctrain.model.shape import ModelShape
from hpctrain.plan.memory_plan import MemoryPlan
from hpctrain.plan.partitioned_engine import build_partition_within_memory
from hpctrain.plan.server_plan import build_role_within_memory
from hpctrain.report.terminal import columns, fit
from hpctrain.text import command
from hpctrain.train.automatic_layout import choose_layout
from hpctrain.train.checkpoints import Checkpoints
from hpctrain.train.control import Control, StepDecision
from hpctrain.train.corpus_comparison import compare_corpus, known_corpus
from hpctrain.train.dead_experts import DeadExperts
from hpctrain.train.fault_recovery import FaultRecovery
from hpctrain.train.gpu_memory import warn_of_missing_memory
from hpctrain.train.layout_verification import verify_layout
from hpctrain.train.memory_ledger import MemoryLedger
from hpctrain.train.mirror_hook import require_neighbour, start_mirrors
from hpctrain.train.mirror_recovery import MirrorRecovery, recover_mirror
from hpctrain.train.rate_change import rate_change
from hpctrain.train.reference_scores import add_reference, copy_references
from hpctrain.train.resume_check import keep_vocabulary, require_resumable
from hpctrain.train.rollback import Rollback
from hpctrain.train.routing import RoutingRecorder, read_routing_file
from hpctrain.train.seconds import PlannedSeconds, StepSeconds, plan_seconds
from hpctrain.train.server.server_checkpoints import ServedCheckpoints
from hpctrain.train.server.server_trainer import ServedTrainer
from hpctrain.train.signals import Signals
from hpctrain.train.skipped_steps import reason_to_stop
from hpctrain.train.spike_response import SpikeResponse
from hpctrain.train.start import require_training_state, source_notes, start_from_source
from hpctrain.train.startup import RunFolder, prepare_ranks, read_deck_on_all_ranks
from hpctrain.train.step import TrainState
from hpctrain.train.stored_choices import with_stored_choices
from hpctrain.train.summary import decay_ended, introduction
from hpctrain.train.time_limit import BYTES_PER_SECOND, Pace, TimeLimit
from hpctrain.train.trainer import MakeTrainer, Trainer, TrainerParts, make_trainer
from hpctrain.train.watchers import EightBitWatch, Evaluation, SlowRanks, StepReport, TraceRecorder
from hpctrain.watch.folder import clear_folder, clear_other_folder, refuse_other_folder, replaces
from hpctrain.watch.newest import find_checkpoint
from hpctrain.watch.peak_flops import PeakFlops
from hpctrain.watch.reporter import Reporter
from hpctrain.watch.statuses import is_done


@dataclass(frozen=True)
class Run:
    """A run that is ready to train from the state of its trainer on.

    Attributes:
        deck: The deck, with all choices that were left open.
        corpus: Training data.
        trainer: Makes the steps.
        checkpoints: Writes the checkpoints.
        folder: Folder of the run.
        predicted: Predicted memory.
        limit: Time limit, if any.
        notes: Sentences about the start, which are printed; the first one is about the run folder.
        routing: Recorder of routing choices, if choices are recorded or followed.
        planned: Predicted seconds of a step, if the deck names machine rates.
        held_out: Sets for evaluation.
    """

    deck: Deck
    corpus: Corpus
    trainer: Trainer
    checkpoints: Checkpoints
    folder: RunFolder
    predicted: MemoryPlan
    limit: TimeLimit | None
    notes: tuple[str, ...]
    routing: RoutingRecorder | None = None
    planned: PlannedSeconds | None = None
    held_out: tuple[HeldOut, ...] = ()

    @property
    def world(self) -> World:
        """World of the run."""
        return self.trainer.world

    def train(self, signals: Signals | None = None, opening: Sequence[str] = ()) -> int:
        """Train up to `run.steps`, or until a signal, a file or the time limit ends the run. Collective.

        Args:
            signals: Signals that this process has received.
            opening: Further sentences to print at the start, such as the cores of the ranks.

        Returns:
            The exit code.
        """
        deck, world, engine, state = self.deck, self.world, self.trainer.engine, self.trainer.state
        folder = Path(deck.run.dir)
        self.folder.take()
        # In a run with servers, rank 0 is one of the ranks that write checkpoints.
        if world.everyone.broadcast_object(self.checkpoints.through_mpi):
            require_parallel_files(world, folder)
        seconds = None if self.planned is None else StepSeconds(self.trainer, self.planned)
        memory = MemoryLedger(self.trainer, self.predicted, folder, seconds)
        with world.agreement():
            if world.rank == 0:
                memory.write()
        newest = self.checkpoints.newest
        if newest is not None:
            copy_references(world, newest.parent.parent, folder)
        reporter = Reporter(world, deck, state.step, newest)
        world.hang.report_to(folder, reporter.record_hang)
        try:
            world.ledger.activity = "measuring the processors"
            peak = PeakFlops(world, deck, folder)
            peak.find()
            if world.rank == 0:  # other ranks may have no part of the model
                reporter.say(
                    introduction(deck, engine, self.corpus, peak.flops, state, self.trainer.rank_description)
                )
            folder_note, *notes = self.notes
            reporter.say(line for line in (folder_note, *opening, *notes) if line)
            if world.rank == 0 and (ended := decay_ended(deck, state.step)):
                reporter.log.warning("%s", ended)
            if newest is not None:
                reporter.say([f"resumes from {newest} at step {state.step}"])
            segments = world.everyone.all_gather_object(world.removed_segments)
            if removed := [segment for of_rank in segments for segment in of_rank]:
                reporter.log.info("removed shared memory of killed jobs: %s", ", ".join(removed))
            reporter.begin()
            world.ledger.activity = "training"
            world.ledger.reset()
            loop = Loop(self, reporter, peak, memory)
            gc.collect()
            gc.freeze()  # scanning the objects that stay would delay all ranks one after the other
            with world.hang.training_steps():
                order = loop.run(Control(world, folder, signals or Signals(), loop.out_of_time))
                self.checkpoints.finish()
            world.ledger.activity = "writing the ledger and the reports"
            for hook in self.trainer.hooks:
                hook.at_end(order)
        except BaseException as error:
            reporter.record_failure(error, self.checkpoints.newest)
            raise
        finally:
            gc.unfreeze()
            world.ledger.timeline = None
            world.ledger.activity = "closing the run"
            world.hang.disable_on_hang()
            with world.hang.allow_silence():  # dashboards receive the last rows, with their own timeout
                reporter.close()
            self.trainer.close()
            engine.close()
            self.corpus.close()
            self.folder.close()
        if loop.spike_response.reason_to_stop:  # a resumed run would stop at the next spike
            return EXIT_USER
        return EXIT_AGAIN if order.stop else EXIT_DONE


class Loop:
    """Loop over the steps of a run, which handles requests, rollbacks and checkpoints between them."""

    def __init__(self, run: Run, reporter: Reporter, peak: PeakFlops, memory: MemoryLedger) -> None:
        self.deck, self.steps, self.limit = run.deck, run.deck.run.steps, run.limit
        self.reporter, self.peak = reporter, peak
        self.trainer, self.checkpoints = trainer, checkpoints = run.trainer, run.checkpoints
        self.pace = Pace(checkpoints.expected_bytes() / (BYTES_PER_SECOND * run.world.nodes))
        self.evaluation = Evaluation(trainer, run.held_out, self.pace, reporter, checkpoints.best)
        rollback = Rollback(trainer, checkpoints, reporter)
        self.spike_response = SpikeResponse(trainer, rollback)
        self.fault_recovery = FaultRecovery(rollback, Path(run.deck.run.dir))
        self._unfinished_request: StepDecision | None = None
        self.report = StepReport(trainer, reporter, peak, self.pace, checkpoints, memory)
        trainer.hooks += [
            *([TraceRecorder(trainer)] if run.deck.run.trace else []),
            SlowRanks(trainer.stragglers(run.deck.stability.straggler_factor), reporter),
            self.pace,
            self.spike_response,
            self.evaluation,
            *([] if memory.seconds is None else [memory.seconds]),
            memory,
            self.report,
            *([run.routing.record_into(Path(run.deck.run.dir))] if run.routing is not None else []),
            *([DeadExperts(trainer.engine.shape, run.world.rank)] if run.deck.model.experts else []),
            *([EightBitWatch(trainer)] if run.deck.precision.fp8_watch else []),
            checkpoints,
            *start_mirrors(run.deck, run.world, checkpoints, trainer.state),
        ]

    def run(self, control: Control) -> StepDecision:
        """Make all steps. Return the last decision, which tells whether and why the run stops. Collective."""
        while self.trainer.state.step < self.steps:
            if why := self.checkpoints.best.reason_to_stop:
                self.save_unless_saved()
                control.forget()
                return StepDecision(why=why, early=True)
            try:
                order = self.advance(control)
            except SilentFaultError as error:
                order = self.fault_recovery.recover(error)
            if order is not None:
                return order
        control.forget()
        return StepDecision()

    def advance(self, control: Control) -> StepDecision | None:
        """Carry out requests and make the next step. Return a decision to stop, or None. Collective."""
        state = self.trainer.state
        order = self._unfinished_request or StepDecision()
        if self.trainer.can_stop and self._unfinished_request is None:
            order = control.agree(self.peak.exceeded)
        if order.measure:
            self.peak.measure_again()
        if order.checkpoint:
            self.reporter.log.info("checkpoint requested: %s", order.why)
            self._unfinished_request = order  # kept if a fault interrupts the save
            self.save_unless_saved()
            self._unfinished_request = None
            control.discard_save_requests()
        if order.stop:
            return order
        self.keep_snapshot()
        self.trainer.advance(self.synchronizes, control.is_pending)
        if self.spike_response.pending_spike is not None:
            self.spike_response.roll_back()
        elif self.spike_response.reason_to_stop:
            self.save()
            return StepDecision(checkpoint=True, stop=True, why=self.spike_response.reason_to_stop)
        elif reason := reason_to_stop(self.deck, state):
            self.end_without_updates(reason)
        elif self.checkpoints.due(state.step):
            self.save()
        if self.checkpoints.lacks_best(state.step):
            self.save()
        return None

    def due(self, step: int) -> bool:
        """Return True if a checkpoint or an evaluation is due after a step."""
        return self.checkpoints.due(step) or self.evaluation.due(step)

    def synchronizes(self, step: int) -> bool:
        """Return True if ranks that train asynchronously synchronize after this step.

        They do so if something is due, or if the run may have to end since it makes no updates.
        """
        most = self.deck.stability.max_skipped_steps
        return self.due(step) or (most > 0 and step % most == 0)

    def end_without_updates(self, reason: str) -> NoReturn:
        """Raise the HpctrainError that ends a run which makes no updates. Collective.

        If all weights are finite, a checkpoint is written first, so that the run can resume.
        """
        weight, step = self.checkpoints.nonfinite_weight(), self.trainer.state.step
        self.reporter.status.note(last_update=step - self.trainer.state.skipped_in_a_row)
        if weight is None:
            self.save_unless_saved()
            self.checkpoints.finish()
        cause = f"step {step}: {self.report.skipped}" if weight is None else f"{weight}"
        with self.trainer.world.agreement():
            raise HpctrainError(f"{self.deck.run.dir}: {reason}; {cause}")

    def keep_snapshot(self) -> None:
        """Copy the present state in memory, if a copy is due. Collective."""
        if self.checkpoints.snapshots.due(self.trainer.state.step):
            self._check_state()
            self.checkpoints.keep_snapshot(self.trainer.state)

    def _check_state(self) -> None:
        """Check the state for silent faults before it is copied or written. Collective."""
        if self.trainer.guard is not None:
            self.trainer.guard.require_rest()

    def save_unless_saved(self) -> None:
        """Write a checkpoint of the present state, if there is none. Collective."""
        if not self.checkpoints.has(self.trainer.state.step):
            self.save()

    def save(self) -> None:
        """Write a checkpoint of the present state, or start to write it in the background. Collective."""
        self._check_state()
        self.reporter.working("checkpointing")
        self.checkpoints.save(self.trainer.state)
        self.reporter.record_checkpoint(self.checkpoints.newest)
        for hook in self.trainer.hooks:
            hook.after_save()

    def out_of_time(self) -> str:
        """Return why the time does not suffice for another step; "" if it does. Called on rank 0."""
        self.pace.checkpoint = self.checkpoints.longest or self.pace.checkpoint
        return self.pace.reason_to_stop(
            self.limit,
            time.monotonic(),
            evaluates=self.evaluation.due(self.trainer.state.step + 1),
            writing=self.checkpoints.is_writing,
        )


def open_run(
    world: World,
    deck: Deck,
    checkpoint: Path | None = None,
    clear: Callable[[], str] | None = None,
    replayed: Path | None = None,
    make: MakeTrainer = make_trainer,
) -> Run:
    """Build the run of a deck, from its start or from a checkpoint. Collective.

    Args:
        world: The world.
        deck: The deck.
        checkpoint: Checkpoint to resume from, if any.
        clear: Called on rank 0 to prepare the run folder, once the deck is known to fit. It returns a
            sentence to print. None, as in a replay, leaves the folder alone until the run trains.
        replayed: Routing file; tokens of its samples go to the experts that it names.
        make: Makes the trainer.

    Raises:
        HpctrainError: The deck cannot run on these ranks, or the routing file does not fit; raised on all
            ranks.
    """
    limit = TimeLimit.find(deck, os.environ, time.monotonic())
    torch.set_num_threads(deck.run.threads)
    world.hang.set_limit(deck.stability.hang_seconds)
    world.use_device(deck.run.device, deck.machine.deterministic)
    world.compare_calls(deck.communication.check)
    corpus = open_corpus(deck, world)
    deck = resolve_vocabulary(deck, corpus)
    world.ledger.activity = "opening the files for evaluation"
    held_out = open_held_out(deck, world, corpus)
    compared = compare_corpus(world, deck, corpus, checkpoint)
    if checkpoint is None:
        compared += source_notes(world, deck)
    if deck.communication.server is not None:
        return _open_served(world, _RunInputs(deck, corpus, held_out, checkpoint, clear, limit, compared))
    world.ledger.activity = "planning the layout"
    deck = choose_functions(deck, world)
    placement = place_models(deck, world)
    planned, seconds = plan_seconds(world, deck, is_resumed=checkpoint is not None)
    routing_file = None
    if replayed is not None:
        routing_file = read_routing_file(world, replayed, ModelShape.of(deck, deck.model.vocabulary or 0))
    world.ledger.activity = "comparing the layout with one rank"
    checked = verify_layout(deck, world, placement.mesh) if deck.stability.verify_layout else ""
    folder_note = ""
    world.ledger.activity = "building the model"

    def prepare_folder() -> None:
        nonlocal folder_note
        with world.agreement():
            folder_note = clear() if clear is not None and world.rank == 0 else ""

    engine, predicted = build_partition_within_memory(deck, placement, prepare_folder)
    warn_of_missing_memory(world, placement.mesh, predicted.stages[placement.stage].memory)
    checkpoints = Checkpoints(deck, engine, known_corpus(world, deck, corpus, checkpoint), world)
    folder = RunFolder(world, deck)
    started_from = ""

    def fill() -> TrainState | None:
        nonlocal started_from
        world.ledger.activity = "loading the model"
        if checkpoint is not None:
            return checkpoints.restore(checkpoint)
        with placement.agreement():
            if deck.model.source is not None and not placement.idle:
                started_from = start_from_source(deck, engine)
        if clear is not None:
            folder.take()  # a reference may be written now
        return None

    world.ledger.activity = "preparing the trainer"
    try:
        trainer = make(TrainerParts(deck, engine, corpus, checkpoint, fill, placement))
        checkpoints.extra_state = {**checkpoints.extra_state, **trainer.extra_state}
        if deck.objective.kind in REFERENCE_KINDS:
            held_out, reference_state = add_reference(trainer.step, corpus, held_out, folder.path, checkpoint)
            checkpoints.extra_state = {**checkpoints.extra_state, **reference_state}
    except BaseException:
        folder.close()
        raise
    routing: RoutingRecorder | None = None
    recorded = 0 if deck.model.experts is None else deck.model.experts.record_routing
    if recorded or routing_file is not None:
        routing = RoutingRecorder(engine, trainer.state, recorded, routing_file)
        trainer.step.choices = routing.choices
    follows = routing.sentence(replayed) if routing is not None and replayed is not None else ""
    notes = (folder_note, checked, started_from, *checkpoints.notes, follows, *compared, seconds)
    return Run(
        deck, corpus, trainer, checkpoints, folder, predicted, limit, notes, routing, planned, held_out
    )


@dataclass(frozen=True)
class _RunInputs:
    """Opened data and settings of a run, from which it is built."""

    deck: Deck
    corpus: Corpus
    held_out: tuple[HeldOut, ...]
    checkpoint: Path | None
    clear: Callable[[], str] | None
    limit: TimeLimit | None
    notes: Sequence[str]


def _open_served(world: World, inputs: _RunInputs) -> Run:
    """Build the run of a deck with servers. Collective."""
    deck, corpus, checkpoint = inputs.deck, inputs.corpus, inputs.checkpoint
    world.ledger.activity = "building the model"
    folder_note = ""

    def prepare_folder() -> None:
        nonlocal folder_note
        with world.agreement():
            folder_note = inputs.clear() if inputs.clear is not None and world.rank == 0 else ""

    engine, predicted = build_role_within_memory(deck, world, prepare_folder)
    extra_state = known_corpus(world, deck, corpus, checkpoint)
    trainer = ServedTrainer(deck, world, engine, corpus.train)
    checkpoints = ServedCheckpoints(deck, engine, extra_state, world, trainer.roles)
    if checkpoint is not None:
        trainer.set_state(checkpoints.restore(checkpoint))
    source = deck.model.source if checkpoint is None else None
    started_from = checkpoints.start_from(deck) if source is not None else ""
    notes = (folder_note, started_from, *checkpoints.notes, *inputs.notes)
    folder = RunFolder(world, deck)
    return Run(
        deck, corpus, trainer, checkpoints, folder, predicted, inputs.limit, notes, held_out=inputs.held_out
    )


def run_deck(
    world: World,
    source: Path | Deck,
    overrides: Sequence[str],
    fresh: bool = False,
    again: bool = False,
    replayed: Path | None = None,
    make: MakeTrainer = make_trainer,
) -> int:
    """Train a deck: `hpctrain run`. Collective.

    Args:
        world: The world.
        source: Path of the deck, or a deck that a script has made.
        overrides: `--set` arguments.
        fresh: True to delete an earlier run in the folder.
        again: True to resume from the newest valid checkpoint in the folder, if any, with this deck.
        replayed: Routing file to follow (see `open_run`).
        make: Makes the trainer.

    Returns:
        The exit code.
    """
    with Signals() as signals:
        world.ledger.activity = "reading the deck"
        # A resumed run derives the number of replicas from the number of ranks, which is checked later.
        deck = read_deck_on_all_ranks(world, source, overrides, None if again else world.size)
        deck, layout_note = choose_layout(world, deck)
        with world.agreement():
            folder = Path(deck.run.dir)
        recovery = recover_mirror(world, folder) if again else MirrorRecovery()
        with world.agreement():
            has_checkpoint = again and bool(checkpoints(folder / "checkpoints"))
            replica_note = ""
            if again and not has_checkpoint:
                deck, replica_note = fit_initial_replicas(deck, world.size)
                check_world(deck, world.size)
        if any(world.everyone.all_gather_object(has_checkpoint)):
            path = find_checkpoint(world, folder)
            state = read_state(path, world.everyone)
            source_checkpoint = _ResumedCheckpoint(path, state, True, (layout_note, *recovery.sentences))
            return _resume_from(world, deck, source_checkpoint, signals, replayed, make)
        with world.agreement():
            if world.rank == 0:
                replaces(deck, fresh, again)
        core_note = prepare_ranks(world, deck)
        if not recovery.mirrored:  # otherwise a job continues on the nodes that are left
            require_neighbour(world, deck)
        reads = [] if replayed is None else [str(replayed)]
        run = open_run(world, deck, None, lambda: clear_folder(deck, fresh, again, reads), replayed, make)
        return run.train(signals, (core_note, replica_note, layout_note, *recovery.sentences))


def resume(
    world: World,
    target: Path,
    overrides: Sequence[str],
    strict: bool = False,
    replayed: Path | None = None,
    make: MakeTrainer = make_trainer,
) -> int:
    """Resume a run: `hpctrain resume`. Collective.

    Args:
        world: The world.
        target: A checkpoint, or a run folder, which stands for its newest valid checkpoint.
        overrides: `--set` arguments. They may allow code that the stored deck names.
        strict: True to refuse a run whose newest checkpoint is damaged.
        replayed: Routing file to follow (see `open_run`).
        make: Makes the trainer.

    Returns:
        The exit code.
    """
    with Signals() as signals:
        world.ledger.activity = "looking for a checkpoint"
        recovery = recover_mirror(world, target)
        path = find_checkpoint(world, target, strict)
        state = read_state(path, world.everyone)
        with world.agreement():
            require_training_state(path, state, overrides)
            trust = trust_of(overrides)
            deck = stored_deck(state, path, [f"run.dir={path.parent.parent}", *overrides], trust)
            require_trusted(deck, path, trust)
        deck, layout_note = choose_layout(world, deck)
        sets_replicas = deck.sources.place("layout.local_steps.replicas").override is not None
        notes = layout_note, *recovery.sentences
        checkpoint = _ResumedCheckpoint(path, state, not sets_replicas, notes)
        return _resume_from(world, deck, checkpoint, signals, replayed, make)


@dataclass(frozen=True)
class _ResumedCheckpoint:
    """Checkpoint that a run resumes from.

    Attributes:
        path: Path of the checkpoint.
        state: Its state.
        fits_replicas: True if the number of replicas follows from the number of ranks.
        notes: Sentences to print at the start.
    """

    path: Path
    state: Mapping[str, Any]
    fits_replicas: bool
    notes: Sequence[str]


def _resume_from(
    world: World,
    deck: Deck,
    checkpoint: _ResumedCheckpoint,
    signals: Signals,
    replayed: Path | None,
    make: MakeTrainer,
) -> int:
    """Train from a checkpoint on. Return the exit code. Collective.

    If all steps of the run are done, only the checkpoint is verified.

    Raises:
        HpctrainError: The deck changes a key that a resumed run must keep, or ends before the checkpoint.
        InputOutputError: The checkpoint is damaged.
    """
    path, state = checkpoint.path, checkpoint.state
    done = False
    with world.agreement():
        before = stored_deck(state, path)
        step = int(state.get("step", 0))
        replica_note, ranks = "", int(state.get("ranks", world.size))
        if checkpoint.fits_replicas:
            deck, replica_note = fit_continued_replicas(deck, before, ranks, world.size)
        require_resumable(deck, before, path, int(state.get("updates", step)), int(state.get("samples", 0)))
        deck = keep_vocabulary(deck, before)
        if deck.run.steps < step:
            below = f"is below the step of {path}, {step}; a resumed run requires a later one"
            if deck.run.tokens is not None:
                raise HpctrainError(
                    deck.problem("run.tokens", f"ends a run at step {deck.run.steps}, which {below}")
                )
            raise HpctrainError(deck.problem("run.steps", below))
        if world.rank == 0 and deck.run.steps == step:
            done = is_done(Path(deck.run.dir))
    if world.everyone.broadcast_object(done):
        verify(path, world.everyone)
        if world.rank == 0:
            more = command("resume", deck.run.dir, "--set", "run.steps=N")
            sentence = f"{deck.run.dir}: all {step} steps are done; continue with {more}"
            print(*fit(sentence, columns()), sep="\n", flush=True)
        return EXIT_DONE
    with world.agreement():
        deck = with_stored_choices(deck, before, state, path)
        if world.rank == 0:
            refuse_other_folder(deck, path)
    core_note, rate_note = prepare_ranks(world, deck), rate_change(deck, before, step)
    if not before.checkpoint.mirror:  # otherwise a run continues on the nodes that are left
        require_neighbour(world, deck)
    run = open_run(world, deck, path, lambda: clear_other_folder(deck, path), replayed, make)
    return run.train(signals, (core_note, rate_note, replica_note, *checkpoint.notes))
