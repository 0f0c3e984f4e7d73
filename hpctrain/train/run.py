"""The run: from a deck to a trained model, its checkpoints and its figures."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoint.exchange.source import settled_keys
from hpctrain.checkpoint.names import checkpoints
from hpctrain.checkpoint.read import read_state
from hpctrain.checkpoint.stored_deck import stored_deck
from hpctrain.checkpoint.verify import verify
from hpctrain.comm.timeline import Timeline
from hpctrain.comm.world import World
from hpctrain.deck.read import deck_text, read_deck
from hpctrain.deck.schema import Deck
from hpctrain.engine.build import (
    Corpus,
    Engine,
    make_mesh,
    open_corpus,
    settle_vocabulary,
)
from hpctrain.engine.place import with_split
from hpctrain.errors import EXIT_AGAIN, EXIT_DONE, HpctrainError
from hpctrain.report.recorded import TRACE_FILE
from hpctrain.report.terminal import columns, fit
from hpctrain.report.trace import write_trace
from hpctrain.train.checkpoints import Checkpoints, find_checkpoint
from hpctrain.train.control import Control, Order
from hpctrain.train.memory import MemoryLedger
from hpctrain.train.origin import compare_tokens, known_tokens
from hpctrain.train.room import build_within_memory
from hpctrain.train.signals import Signals
from hpctrain.train.start import require_training_state, start_from_source
from hpctrain.train.startup import check_deck_file, check_places, check_run_folder
from hpctrain.train.step import StepResult
from hpctrain.train.summary import decay_ended, introduction, outcome, warms_again
from hpctrain.train.time_limit import Pace, TimeLimit, expected_seconds
from hpctrain.train.trainer import Trainer
from hpctrain.train.verify import verify_layout
from hpctrain.watch.folder import clear_folder, refuse_other_folder, replaces, take_folder, way_on
from hpctrain.watch.machine import Peak
from hpctrain.watch.metrics import StepMetrics, peak_rss_bytes
from hpctrain.watch.reporter import Reporter
from hpctrain.watch.statuses import is_done
from hpctrain.watch.stragglers import Stragglers
from hpctrain.watch.watchdog import Watchdog
from hpctrain.words import command

TRACED_SPANS = 1_000_000
"""In the trace of a run at most, besides the actions of its schedule: what Perfetto opens with ease."""


class Run:
    """One run of a deck on the ranks of the world, from `state` on."""

    def __init__(
        self,
        world: World,
        deck: Deck,
        checkpoint: Path | None = None,
        split: Sequence[int] | None = None,
        clear: Callable[[], str] = str,
    ) -> None:
        """`split`, of a run that goes on in its old layout, stands in for one that would be measured.

        `clear` makes the run's folder ready, on rank 0, once nothing can be refused any more; what it
        returns is said at the start.
        """
        self.limit = TimeLimit.find(deck, os.environ, time.monotonic())
        torch.set_num_threads(deck.run.threads)
        world.use_device(deck.run.device)
        world.compare_calls(deck.communication.check)
        self.world = world
        self.corpus: Corpus = open_corpus(deck, world)
        self.deck = settle_vocabulary(deck, self.corpus.file)
        self.compared = compare_tokens(world, self.deck, self.corpus.file, checkpoint)
        self.mesh = make_mesh(self.deck, world)
        self.layout_check = verify_layout(self.deck, world, self.mesh) if deck.stability.verify_layout else ""
        self.engine: Engine
        self.engine, predicted = build_within_memory(
            with_split(self.deck, split), world, self.mesh, ready=lambda: self._clear(clear)
        )
        self.folder = Path(self.deck.run.dir)
        known = known_tokens(world, self.corpus.file)
        self.checkpoints = Checkpoints(self.deck, self.engine, known)
        state = None if checkpoint is None else self.checkpoints.restore(checkpoint)
        source = self.deck.model.source if checkpoint is None else None
        self.started_from = start_from_source(self.deck, self.engine) if source is not None else ""
        self.trainer = Trainer(self.deck, self.engine, self.corpus.train, state)
        self.trainer.step.before_update = self.checkpoints.protect
        self.state = self.trainer.state
        self.memory = MemoryLedger(self.engine, self.trainer.activations, predicted)
        self.peak = Peak(world, self.deck, self.folder)
        self.pace = Pace(expected_seconds(self.checkpoints.expected_bytes, world.nodes))
        self.log = logging.getLogger("hpctrain")

    def _clear(self, clear: Callable[[], str]) -> None:
        with self.world.agreement():
            self.stays = clear() if self.world.rank == 0 else ""

    def train(self, signals: Signals | None = None, told: Sequence[str] = ()) -> int:
        """Train up to `run.steps`, or until signals, a file or the clock ask to stop; the exit code.

        `told` is said at the start: which cores the ranks have, and what was found on the way here.
        """
        deck, world = self.deck, self.world
        with world.agreement():
            lock = take_folder(self.folder) if world.rank == 0 else None
        check_run_folder(world, self.folder)
        with world.agreement():
            if world.rank == 0:
                (self.folder / "checkpoints").mkdir(exist_ok=True)
                (self.folder / "deck.toml").write_text(deck_text(deck), encoding="utf-8")
                self.memory.write(self.folder)
        newest = self.checkpoints.newest
        facts = {
            "title": deck.run.title,
            "started_in": str(Path.cwd()),
            "ranks": world.size,
            "nodes": world.nodes,
            "steps": deck.run.steps,
            "step": self.state.step,
            "checkpoint": None if newest is None else str(newest),
        }
        reporter = Reporter(world, deck, self.state.step, facts, newest is not None)
        try:
            self.peak.find()
            reporter.say(introduction(deck, self.engine, self.corpus, self.peak.flops))
            heeded = (self.stays, *told, self.layout_check, self.started_from, *self.compared)
            reporter.say(line for line in heeded if line)
            if world.rank == 0 and (ended := decay_ended(deck, self.state.step)):
                self.log.warning("%s", ended)
            if newest is not None:
                reporter.say([f"goes on from {newest} at step {self.state.step}"])
            swept = [each for names in world.everyone.all_gather_object(world.swept) for each in names]
            if swept:
                reporter.log.info("removed what killed jobs had left in shared memory: %s", ", ".join(swept))
            reporter.begin()
            world.ledger.reset()
            if deck.run.trace:
                most = TRACED_SPANS // (deck.run.trace_steps * world.size)
                world.ledger.timeline = Timeline(deck.run.trace_steps, most)
            gc.collect()
            gc.freeze()  # what is there now stays: looking through it would hold up all ranks in turn
            with Watchdog(world, self.folder, deck.stability.hang_seconds, reporter.hangs):
                order = self._train_steps(reporter, signals or Signals())
                self.checkpoints.finish()
            self._finish(reporter, order)
        except BaseException as error:
            reporter.failed(error, self.checkpoints.newest)
            raise
        finally:
            gc.unfreeze()
            world.ledger.timeline = None
            reporter.close()
            self.engine.close()
            if lock is not None:
                lock.close()
        return EXIT_AGAIN if order.stop else EXIT_DONE

    def _train_steps(self, reporter: Reporter, signals: Signals) -> Order:
        """All steps, with what is asked for between them; the last order, which says whether to stop."""
        control = Control(self.world, self.folder, signals, self._out_of_time)
        stragglers = Stragglers(self.mesh, self.deck.stability.straggler_factor)
        while self.state.step < self.deck.run.steps:
            order = control.agree(self.peak.exceeded)
            if order.measure:
                self.peak.measure_again()
            if order.checkpoint:
                reporter.log.info("checkpoint asked for: %s", order.why)
                if not self.checkpoints.has(self.state.step):
                    self.save(reporter)
                control.saved()
            if order.stop:
                return order
            self._train_step(reporter, stragglers)
        control.forget()
        return Order()

    def _out_of_time(self) -> str:
        """On rank 0, why no other step can be made in time; "" where one can."""
        self.pace.checkpoint = self.checkpoints.longest or self.pace.checkpoint
        return self.pace.reason_to_stop(
            self.limit,
            time.monotonic(),
            evaluates=self._evaluates(self.state.step + 1),
            writing=self.checkpoints.under_way,
        )

    def _evaluates(self, step: int) -> bool:
        """Whether an evaluation comes after that step."""
        every = self.deck.run.evaluate_every
        due = step == self.deck.run.steps or (every > 0 and step % every == 0)
        return due and self.corpus.validation is not None

    def _train_step(self, reporter: Reporter, stragglers: Stragglers) -> None:
        deck, state, world = self.deck, self.state, self.world
        started, communicating = time.perf_counter(), world.ledger.seconds
        result = self.trainer.train_step()
        seconds = time.perf_counter() - started
        slow = stragglers.step(seconds - (world.ledger.seconds - communicating))
        if slow is not None:
            reporter.status.note(stragglers=[straggler.row() for straggler in slow])
        self.pace.steps.append(seconds)
        self.checkpoints.provenance.note(state.step, result.loss, result.grad_norm)
        validation = self._evaluate(reporter) if self._evaluates(state.step) else None
        if result.skipped:
            self.log.warning(
                "step %d: loss %g or gradient norm %g is not finite; update skipped on all ranks (%d so far)",
                state.step,
                result.loss,
                result.grad_norm,
                state.skipped,
            )
        with world.agreement():
            if world.rank == 0:
                row = self._row(result, seconds, validation)
                reporter.step(row, max(self.pace.steps), self.checkpoints.newest)
        self.checkpoints.poll()
        every = deck.checkpoint.every
        if state.step == deck.run.steps or (every and state.step % every == 0):
            self.save(reporter)

    def _evaluate(self, reporter: Reporter) -> float:
        assert self.corpus.validation is not None
        reporter.working("evaluating")
        started = time.perf_counter()
        loss = self.trainer.step.evaluate(self.corpus.validation, self.deck.run.evaluate_sequences)
        self.pace.evaluation = time.perf_counter() - started
        return loss

    def _row(self, result: StepResult, seconds: float, validation: float | None) -> StepMetrics:
        rate = result.tokens / seconds
        return StepMetrics(
            step=self.state.step,
            tokens=self.state.tokens,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.learning_rate,
            seconds=seconds,
            tokens_per_s=rate,
            batch=result.batch,
            skipped=result.skipped,
            loss_scale=self.engine.loss_scale.value if self.engine.loss_scale.window else None,
            mfu=self.peak.share(rate * self.engine.shape.flops_per_token / self.world.size),
            peak_rss_bytes=peak_rss_bytes(),
            validation_loss=validation,
        )

    def save(self, reporter: Reporter) -> None:
        """Write a checkpoint of the present state, and the trace so far."""
        reporter.working("checkpointing")
        self.checkpoints.save(self.state)
        reporter.saved(self.checkpoints.newest)
        timeline = self.world.ledger.timeline
        if timeline is not None:
            write_trace(self.folder / TRACE_FILE, timeline, self.mesh, self.engine.plan)
            if timeline.dropped:
                self.log.warning(
                    "%s leaves out some communication: this rank alone had %d operations too many in the "
                    "steps it holds; with a smaller run.trace_steps, all may have room",
                    self.folder / TRACE_FILE,
                    timeline.dropped,
                )

    def _finish(self, reporter: Reporter, order: Order) -> None:
        """Write down and say what there is to say at the end, or before it by an order to stop."""
        measured, newest = self.memory.measured(), self.checkpoints.newest
        reporter.stepped()
        with self.world.agreement():
            if self.world.rank == 0:
                self.memory.write(self.folder, measured)
                self.world.ledger.write(self.folder / "ledger.json")
                reporter.say(outcome(self.folder, self.deck.run.trace, newest, self.state.skipped))
                reporter.say(self.memory.table(measured))
        if order.stop:
            step = f"after step {self.state.step} of {self.deck.run.steps}"
            go_on = way_on(self.folder, newest)
            reporter.say([f"stopped {step}: {order.why}; go on with `{go_on}`"])
        reporter.ended(newest, order.why if order.stop else "")


def run_deck(
    world: World, path: Path, overrides: Sequence[str], fresh: bool = False, again: bool = False
) -> int:
    """`hpctrain run`: train a deck, from its beginning; the exit code.

    With `again`, from the newest good checkpoint where its run folder has any, by the deck as it is now.
    """
    with Signals() as signals:
        check_deck_file(world, path)
        with world.agreement():
            deck = read_deck(path, overrides, world.size, settled_keys)
            folder = Path(deck.run.dir)
            begun = again and bool(checkpoints(folder / "checkpoints"))
        if any(world.everyone.all_gather_object(begun)):
            checkpoint = find_checkpoint(world, folder)
            return _go_on(world, deck, checkpoint, read_state(checkpoint, world.everyone), signals)
        with world.agreement():
            if world.rank == 0:
                replaces(deck, fresh, again)
        bound = check_places(world, deck)
        run = Run(world, deck, clear=lambda: clear_folder(deck, fresh, again))
        return run.train(signals, (bound,))


def resume(world: World, target: Path, overrides: Sequence[str], strict: bool = False) -> int:
    """`hpctrain resume`: go on from a checkpoint, or from the newest good one of a run's folder.

    With `strict`, a run whose newest checkpoint is damaged does not go on.
    """
    with Signals() as signals:
        path = find_checkpoint(world, target, strict)
        state = read_state(path, world.everyone)
        with world.agreement():
            require_training_state(path, state, overrides)
            deck = stored_deck(state, path, [f"run.dir={path.parent.parent}", *overrides])
        return _go_on(world, deck, path, state, signals)


def _go_on(world: World, deck: Deck, path: Path, state: Mapping[str, Any], signals: Signals) -> int:
    """Train on from a checkpoint with that state; the exit code.

    A run that is done stays as it is. HpctrainError where the checkpoint is beyond the last step,
    InputOutputError where it is damaged.
    """
    done = False
    with world.agreement():
        step = int(state.get("step", 0))
        if deck.run.steps < step:
            told = f"is below the step of {path}, {step}; a run goes on to a later one"
            raise HpctrainError(deck.problem("run.steps", told))
        if world.rank == 0 and deck.run.steps == step:
            done = is_done(Path(deck.run.dir))
    if world.everyone.broadcast_object(done):
        verify(path, world.everyone)
        if world.rank == 0:
            more = command("resume", deck.run.dir, "--set", "run.steps=N")
            told = f"{deck.run.dir}: all {step} steps are done, nothing is left to do; {more} goes on"
            print(*fit(told, columns()), sep="\n", flush=True)
        return EXIT_DONE
    with world.agreement():
        before = stored_deck(state, path)
        same = deck.layout == before.layout
        if world.rank == 0:
            refuse_other_folder(deck, path)
    bound = check_places(world, deck)
    return Run(world, deck, path, state.get("split") if same else None).train(
        signals, (bound, warms_again(deck, before, int(state["step"])))
    )
