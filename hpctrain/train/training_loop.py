"""A run that is ready to train, and the loop over its steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hpctrain.audit.detected_fault import SilentFaultError
from hpctrain.comm.parallel_files import require_parallel_files
from hpctrain.comm.world import World
from hpctrain.data.corpus import Corpus
from hpctrain.data.held_out import HeldOut
from hpctrain.deck.schema import Deck
from hpctrain.errors import EXIT_AGAIN, EXIT_DONE, EXIT_USER, HpctrainError
from hpctrain.plan.memory_plan import MemoryPlan
from hpctrain.train.checkpoints import Checkpoints
from hpctrain.train.control import Control, StepDecision
from hpctrain.train.dead_experts import DeadExperts
from hpctrain.train.fault_recovery import FaultRecovery
from hpctrain.train.memory_ledger import MemoryLedger
from hpctrain.train.mirror_hook import start_mirrors
from hpctrain.train.reference_scores import copy_references
from hpctrain.train.rollback import Rollback
from hpctrain.train.routing import RoutingRecorder
from hpctrain.train.run_hooks import Evaluation, QuantizationLossHook, SlowRanks, StepReport, TraceRecorder
from hpctrain.train.signals import Signals
from hpctrain.train.skipped_steps import reason_to_stop
from hpctrain.train.spike_response import SpikeResponse
from hpctrain.train.startup import RunFolder
from hpctrain.train.step_seconds import PredictedSeconds, StepSeconds
from hpctrain.train.summary import decay_ended, introduction
from hpctrain.train.time_limit import BYTES_PER_SECOND, Pace, TimeLimit
from hpctrain.train.trainer import Trainer
from hpctrain.watch.peak_flops import PeakFlops
from hpctrain.watch.reporter import Reporter


@dataclass(frozen=True)
class Run:
    """A run that is ready to train from the state of its trainer on.

    Attributes:
        deck: The deck, with all choices that were left open.
        corpus: Training data.
        trainer: Trainer, which makes the steps.
        checkpoints: Writer of the checkpoints.
        folder: Folder of the run.
        memory_plan: Predicted memory.
        time_limit: Time limit, if any.
        notes: Sentences about the start, which are printed; the first one is about the run folder.
        routing: Recorder of routing choices, if choices are recorded or followed.
        predicted_seconds: Predicted seconds of a step, if the deck names machine rates.
        held_out: Sets for evaluation.
    """

    deck: Deck
    corpus: Corpus
    trainer: Trainer
    checkpoints: Checkpoints
    folder: RunFolder
    memory_plan: MemoryPlan
    time_limit: TimeLimit | None
    notes: tuple[str, ...]
    routing: RoutingRecorder | None = None
    predicted_seconds: PredictedSeconds | None = None
    held_out: tuple[HeldOut, ...] = ()

    @property
    def world(self) -> World:
        """World of the run."""
        return self.trainer.world

    def train(self, signals: Signals | None = None, start_notes: Sequence[str] = ()) -> int:
        """Train up to `run.steps`, or until a signal, a file or the time limit ends the run. Collective.

        Args:
            signals: Signals that this process has received.
            start_notes: Further sentences to print at the start, such as the cores of the ranks.

        Returns:
            The exit code.
        """
        world, folder = self.world, Path(self.deck.run.dir)
        memory = self._write_first_files(folder)
        reporter = Reporter(world, self.deck, self.trainer.state.step, self.checkpoints.newest)
        world.hang.report_to(folder, reporter.record_hang)
        try:
            world.ledger.activity = "measuring the processors"
            peak = PeakFlops(world, self.deck, folder)
            peak.find()
            self._report_start(reporter, peak, start_notes)
            reporter.begin()
            world.ledger.activity = "training"
            world.ledger.reset()
            loop = Loop(self, reporter, peak, memory)
            gc.collect()
            gc.freeze()  # scanning the objects that stay would delay all ranks one after the other
            with world.hang.training_steps():
                decision = loop.run(Control(world, folder, signals or Signals(), loop.out_of_time))
                self.checkpoints.finish()
            world.ledger.activity = "writing the ledger and the reports"
            for hook in self.trainer.hooks:
                hook.at_end(decision)
        except BaseException as error:
            reporter.record_failure(error, self.checkpoints.newest)
            raise
        finally:
            gc.unfreeze()
            self._close(reporter)
        if loop.spike_response.reason_to_stop:  # a resumed run would stop at the next spike
            return EXIT_USER
        return EXIT_AGAIN if decision.stop else EXIT_DONE

    def _write_first_files(self, folder: Path) -> MemoryLedger:
        """Lock the run folder, and write the predictions and references of the run there. Collective."""
        world, seconds = self.world, None
        self.folder.lock()
        # In a run with servers, rank 0 is one of the ranks that write checkpoints.
        if world.everyone.broadcast_object(self.checkpoints.through_mpi):
            require_parallel_files(world, folder)
        if self.predicted_seconds is not None:
            seconds = StepSeconds(self.trainer, self.predicted_seconds)
        memory = MemoryLedger(self.trainer, self.memory_plan, folder, seconds)
        with world.agreement():
            if world.rank == 0:
                memory.write()
        if self.checkpoints.newest is not None:
            copy_references(world, self.checkpoints.newest.parent.parent, folder)
        return memory

    def _report_start(self, reporter: Reporter, peak: PeakFlops, start_notes: Sequence[str]) -> None:
        """Print and log what the run is and where it starts. Collective."""
        world, trainer, newest = self.world, self.trainer, self.checkpoints.newest
        deck, step = self.deck, trainer.state.step
        if world.rank == 0:  # other ranks may have no part of the model
            ranks = trainer.rank_description
            reporter.say(introduction(deck, trainer.engine, self.corpus, peak.flops, trainer.state, ranks))
        folder_note, *notes = self.notes
        reporter.say(line for line in (folder_note, *start_notes, *notes) if line)
        if world.rank == 0 and (warning := decay_ended(deck, step)):
            reporter.log.warning("%s", warning)
        if newest is not None:
            reporter.say([f"resumes from {newest} at step {step}"])
        segments_of_ranks = world.everyone.all_gather_object(world.removed_segments)
        if removed := [segment for segments in segments_of_ranks for segment in segments]:
            reporter.log.info("removed shared memory of killed jobs: %s", ", ".join(removed))

    def _close(self, reporter: Reporter) -> None:
        """Close all files of the run, and release its memory."""
        self.world.ledger.timeline = None
        self.world.ledger.activity = "closing the run"
        self.world.hang.disable_on_hang()
        with self.world.hang.allow_silence():  # dashboards receive the last rows, with their own timeout
            reporter.close()
        self.trainer.close()
        self.trainer.engine.close()
        self.corpus.close()
        self.folder.close()


class Loop:
    """Loop over the steps of a run, which handles requests, rollbacks and checkpoints between them."""

    def __init__(self, run: Run, reporter: Reporter, peak: PeakFlops, memory: MemoryLedger) -> None:
        self.deck, self.steps, self.limit = run.deck, run.deck.run.steps, run.time_limit
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
            *([QuantizationLossHook(trainer)] if run.deck.precision.fp8_watch else []),
            checkpoints,
            *start_mirrors(run.deck, run.world, checkpoints, trainer.state),
        ]

    def run(self, control: Control) -> StepDecision:
        """Make all steps. Return the last decision, which says whether and why the run stops. Collective."""
        while self.trainer.state.step < self.steps:
            if reason := self.checkpoints.best.reason_to_stop:
                self.save_unless_saved()
                control.remove_requests()
                return StepDecision(reason=reason, ends_early=True)
            try:
                decision = self.advance(control)
            except SilentFaultError as error:
                decision = self.fault_recovery.recover(error)
            if decision is not None:
                return decision
        control.remove_requests()
        return StepDecision()

    def advance(self, control: Control) -> StepDecision | None:
        """Carry out requests and make the next step. Return a decision to stop, or None. Collective."""
        state = self.trainer.state
        decision = self._unfinished_request or StepDecision()
        if self.trainer.can_stop and self._unfinished_request is None:
            decision = control.agree(self.peak.exceeded)
        if decision.measure:
            self.peak.measure_again()
        if decision.checkpoint:
            self.reporter.log.info("checkpoint requested: %s", decision.reason)
            self._unfinished_request = decision  # kept if a fault interrupts the save
            self.save_unless_saved()
            self._unfinished_request = None
            control.discard_save_requests()
        if decision.stop:
            return decision
        self.keep_snapshot()
        self.trainer.advance(self.synchronizes, control.is_pending)
        if self.spike_response.pending_spike is not None:
            self.spike_response.roll_back()
        elif self.spike_response.reason_to_stop:
            self.save()
            return StepDecision(checkpoint=True, stop=True, reason=self.spike_response.reason_to_stop)
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
        cause = f"step {step}: {self.report.skip_reason}" if weight is None else f"{weight}"
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
            self.trainer.guard.check_state()

    def save_unless_saved(self) -> None:
        """Write a checkpoint of the present state, if there is none. Collective."""
        if not self.checkpoints.has_newest(self.trainer.state.step):
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
