"""Hooks that report steps, evaluate, record traces and find slow ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

from hpctrain.comm.timeline import Timeline
from hpctrain.costs.layer_flops import model_flops
from hpctrain.data.held_out import HeldOut
from hpctrain.host.memory import peak_rss_bytes
from hpctrain.model.mixtures.expert_load import ExpertLoad
from hpctrain.parallel.fp8.quantization_loss import loss_metrics
from hpctrain.report.recorded import TRACE_FILE
from hpctrain.report.trace import write_trace
from hpctrain.train.best_evaluation import BestSoFar
from hpctrain.train.checkpoints import Checkpoints
from hpctrain.train.control import StepDecision
from hpctrain.train.hook import Hook, StepDone
from hpctrain.train.memory_ledger import MemoryLedger
from hpctrain.train.skipped_steps import skip_reason
from hpctrain.train.summary import outcome
from hpctrain.train.time_limit import Pace
from hpctrain.train.trainer import Trainer
from hpctrain.watch.folder import resume_command
from hpctrain.watch.metrics import StepMetrics
from hpctrain.watch.peak_flops import PeakFlops
from hpctrain.watch.reporter import Reporter
from hpctrain.watch.stragglers import TimeComparison

TRACED_SPANS = 1_000_000
"""Largest number of spans in a trace besides the actions of the schedule, which Perfetto opens quickly."""


class SlowRanks(Hook):
    """Hook that writes stragglers into the status."""

    def __init__(self, stragglers: TimeComparison, reporter: Reporter) -> None:
        self.stragglers, self.reporter = stragglers, reporter

    def after_step(self, done: StepDone) -> None:
        """Compare the times of the ranks at the end of a window of steps."""
        slow = self.stragglers.step(done.compute_seconds)
        if slow is not None:
            self.reporter.status.note(stragglers=[straggler.row() for straggler in slow])

    after_step_alone = after_step


class Evaluation(Hook):
    """Hook that evaluates held-out sets every `run.evaluate_every` steps and after the last step."""

    def __init__(
        self, trainer: Trainer, sets: Sequence[HeldOut], pace: Pace, reporter: Reporter, best: BestSoFar
    ) -> None:
        self.run, self.trainer, self.sets = trainer.deck.run, trainer, sets
        self.pace, self.reporter, self.best = pace, reporter, best

    def due(self, step: int) -> bool:
        """Return True if an evaluation follows the step."""
        every = self.run.evaluate_every
        return bool(self.sets) and (step == self.run.steps or (every > 0 and step % every == 0))

    def after_step(self, done: StepDone) -> None:
        """Evaluate all sets and record their metrics, if an evaluation is due."""
        if not self.due(done.state.step):
            return
        self.reporter.working("evaluating")
        started = time.perf_counter()
        names = self.trainer.evaluation_metrics
        evaluated: dict[str, dict[str, float]] = {}
        for each in self.sets:
            metrics = self.trainer.evaluate(each.batches, each.sequences)
            reported = {name: value for name, value in metrics.items() if name in names}
            evaluated[each.name] = each.metrics(**reported)
        done.evaluated = evaluated
        self.best.add_evaluation(done.state.step, done.evaluated)
        self.reporter.status.note(
            evaluated={"step": done.state.step, "sets": done.evaluated},
            best={"of": self.best.set_name, "step": self.best.step, "loss": self.best.loss},
        )
        self.pace.evaluation = time.perf_counter() - started


class TraceRecorder(Hook):
    """Hook that records the last steps, and writes them as a trace with every checkpoint."""

    def __init__(self, trainer: Trainer) -> None:
        self.engine, run = trainer.engine, trainer.deck.run
        self.path = Path(run.dir) / TRACE_FILE
        most = TRACED_SPANS // (run.trace_steps * self.engine.world.size)
        self.timeline = Timeline(run.trace_steps, most)
        self.engine.world.ledger.timeline = self.timeline

    def around_step(self, step: int) -> AbstractContextManager[object]:
        """Record from here on as the given step."""
        self.timeline.begin_step(step)
        return nullcontext()

    def after_save(self) -> None:
        """Write the trace."""
        write_trace(self.path, self.timeline, self.engine.mesh, self.engine.schedule)
        if self.timeline.dropped:
            logging.getLogger("hpctrain").warning(
                "%s omits some communication: %d operations of this rank exceed its limit; reduce "
                "run.trace_steps to record all",
                self.path,
                self.timeline.dropped,
            )


class QuantizationLossHook(Hook):
    """Hook that lets fp8 products measure their quantization loss every `precision.fp8_watch` steps."""

    def __init__(self, trainer: Trainer) -> None:
        self.every = trainer.deck.precision.fp8_watch
        self.statistics = trainer.engine.stage.layer_context.statistics

    def around_step(self, step: int) -> AbstractContextManager[object]:
        """Turn detailed statistics on for steps in which they are due."""
        self.statistics.detailed_step = self.every > 0 and step % self.every == 0
        return nullcontext()


class StepReport(Hook):
    """Hook that reports each step in metrics, log, terminal and status, and the outcome of the run."""

    def __init__(
        self,
        trainer: Trainer,
        reporter: Reporter,
        peak: PeakFlops,
        pace: Pace,
        checkpoints: Checkpoints,
        memory: MemoryLedger,
    ) -> None:
        self.deck, self.engine, self.state = trainer.deck, trainer.engine, trainer.state
        self.world, self.trainer = trainer.world, trainer
        self.reporter = reporter
        self.peak, self.pace, self.checkpoints, self.memory = peak, pace, checkpoints, memory
        self.folder = Path(self.deck.run.dir)
        self.skip_reason = ""
        """Reason why the last step without an update was skipped."""

    def after_step(self, done: StepDone) -> None:
        """Report the step from rank 0, and warn of a skipped update. Collective."""
        with self.world.agreement():
            self.after_step_alone(done)

    def after_step_alone(self, done: StepDone) -> None:
        """Report the step from this rank alone."""
        result, state = done.result, done.state
        if result.skipped:
            self.skip_reason = skip_reason(result)
        if result.skipped and result.spike is None:
            logging.getLogger("hpctrain").warning(
                "step %d: %s; update skipped on all ranks (%d so far)",
                state.step,
                self.skip_reason,
                state.skipped,
            )
        if self.world.rank == 0:
            row = self._row(done)
            self.reporter.step(row, max(self.pace.steps), self.checkpoints.newest)
            if row.epochs and row.validation_loss is not None:
                epochs = ", ".join(f"{name} {times:.2f}" for name, times in row.epochs.items())
                self.reporter.say([f"epochs of the mixture: {epochs}"])

    def _row(self, done: StepDone) -> StepMetrics:
        result, engine = done.result, self.engine
        of_samples = self.deck.data.dataset is not None
        count, total = (
            (result.batch, done.state.samples) if of_samples else (result.tokens, done.state.tokens)
        )
        rate = count / done.seconds
        # The FLOPs of a sample of a user's data set are not known.
        flops = None if of_samples else model_flops(engine.architecture).flops_per_token
        batches = self.trainer.step.batches
        assert batches.order is not None
        load = ExpertLoad.of(result.statistics, engine.shape) if self.deck.model.experts else None
        return StepMetrics(
            step=done.state.step,
            tokens=total,
            metrics=result.metrics,
            grad_norm=result.grad_norm,
            lr=result.learning_rate,
            seconds=done.seconds,
            tokens_per_s=rate,
            batch=result.batch,
            skipped=result.skipped,
            epoch=batches.epoch(done.state.samples),
            epochs=batches.order.epochs_by_entry(done.state.samples) or None,
            loss_scale=engine.control.loss_scale.value if engine.control.loss_scale.window else None,
            mfu=None if flops is None else self.peak.share(rate * flops / self.trainer.computing_ranks),
            peak_rss_bytes=peak_rss_bytes(),
            evaluated=done.evaluated,
            experts=None if load is None else load.row(),
            fp8=loss_metrics(result.statistics),
            payload_bytes=done.payload,
            emulated_link=self.deck.communication.emulate,
            staleness=result.staleness or None,
            spike=None if result.spike is None else result.spike.why,
            went_back=None if done.rollback_cause is None else asdict(done.rollback_cause),
        )

    def at_end(self, decision: StepDecision) -> None:
        """Write the ledger, and report how the run ended."""
        reporter, run, world = self.reporter, self.deck.run, self.world
        newest = self.checkpoints.newest
        reporter.close_progress()
        with world.agreement():
            if world.rank == 0:
                world.ledger.write(self.folder / "ledger.json")
                reporter.say(outcome(self.folder, run.trace, newest, self.state.skipped))
                reporter.say(self.trainer.outcome_lines)
                reporter.say(self.memory.table())
                reporter.say([] if self.memory.seconds is None else self.memory.seconds.table())
        if decision.stop:
            step = f"after step {self.state.step} of {run.steps}"
            reporter.say(
                [f"stopped {step}: {decision.reason}; resume with `{resume_command(self.folder, newest)}`"]
            )
        elif decision.ends_early:
            step = f"after step {self.state.step} of {run.steps}"
            reporter.say([f"ended {step}: {decision.reason}; continue with a higher run.patience, or 0"])
        reporter.record_end(newest, decision.reason, decision.ends_early)
