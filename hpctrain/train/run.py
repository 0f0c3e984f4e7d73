"""The run: from a deck to a trained model, its checkpoints and its figures."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoint.keep import checkpoints
from hpctrain.checkpoint.read import read_state
from hpctrain.checkpoint.source import settled_keys
from hpctrain.checkpoint.stored_deck import stored_deck
from hpctrain.comm.timeline import Timeline
from hpctrain.comm.world import World
from hpctrain.deck.read import deck_text, read_deck
from hpctrain.deck.schema import Deck
from hpctrain.errors import EXIT_DONE
from hpctrain.model.dtypes import DTYPES
from hpctrain.plan.libraries import library_bytes
from hpctrain.plan.memory import plan_memory
from hpctrain.report.recorded import TRACE_FILE
from hpctrain.report.trace import write_trace
from hpctrain.train.batch_size import batch_at
from hpctrain.train.build import (
    Corpus,
    Engine,
    build_engine,
    make_mesh,
    open_corpus,
    settle_vocabulary,
)
from hpctrain.train.checkpoints import Checkpoints, find_checkpoint
from hpctrain.train.folder import lock_folder, refuse_other_run, remove_run
from hpctrain.train.keeping import introduce_keeping
from hpctrain.train.log import close_log, open_log
from hpctrain.train.machine import measure_gemm_flops
from hpctrain.train.memory import MemoryLedger
from hpctrain.train.metrics import MetricsWriter, StepMetrics, peak_rss_bytes
from hpctrain.train.place import with_split
from hpctrain.train.progress import Progress
from hpctrain.train.start import require_training_state, start_from_source
from hpctrain.train.step import Step, StepResult, TrainState
from hpctrain.train.verify import verify_layout
from hpctrain.units import format_bytes, format_count

TRACED_SPANS = 1_000_000
"""In the trace of a run at most, besides the actions of its schedule: what Perfetto opens with ease."""


class Run:
    """One run of a deck on the ranks of the world, from `state` on."""

    def __init__(
        self, world: World, deck: Deck, checkpoint: Path | None = None, split: Sequence[int] | None = None
    ) -> None:
        """`split`, of a run that goes on in its old layout, stands in for one that would be measured."""
        torch.set_num_threads(deck.run.threads)
        world.use_device(deck.run.device)
        self.world = world
        self.corpus: Corpus = open_corpus(deck, world)
        self.deck = settle_vocabulary(deck, self.corpus.file)
        self.mesh = make_mesh(self.deck, world)
        self.layout_check = verify_layout(self.deck, world, self.mesh) if deck.stability.verify_layout else ""
        libraries = library_bytes() if world.device.type == "cpu" else 0
        self.engine: Engine = build_engine(with_split(self.deck, split), world, self.mesh)
        predicted = plan_memory(
            self.deck,
            world.size,
            self.engine.shape.vocabulary,
            libraries,
            max(1, world.size // world.nodes),
            self.engine.placement.split,
            self.engine.plan,
        )
        self.memory = MemoryLedger(self.engine, predicted)
        self.folder = Path(self.deck.run.dir)
        self.checkpoints = Checkpoints(self.deck, self.engine, self.corpus.file.tokenizer_text)
        self.state = TrainState() if checkpoint is None else self.checkpoints.restore(checkpoint)
        source = self.deck.model.source if checkpoint is None else None
        self.started_from = start_from_source(self.deck, self.engine) if source is not None else ""
        self.step = Step(
            self.engine,
            self.corpus.train,
            self.deck.batch.micro_size,
            self.deck.optimizer.clip,
            self.deck.run.seed,
        )
        self.step.before_update = self.checkpoints.protect
        self.log = logging.getLogger("hpctrain")

    def train(self) -> int:
        """Train up to `run.steps`; the exit code."""
        deck, world = self.deck, self.world
        resumed, lock = self.checkpoints.newest is not None, None
        with world.agreement():
            if world.rank == 0:
                (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
                lock = lock_folder(self.folder)
                (self.folder / "deck.toml").write_text(deck_text(deck), encoding="utf-8")
                self.memory.write(self.folder)
        with world.agreement():
            self.log = open_log(self.folder, world.rank)
            metrics = (
                MetricsWriter(self.folder / "metrics.jsonl", self.state.step if resumed else None)
                if world.rank == 0
                else None
            )
        peak = deck.machine.peak_flops or self._measured_peak()
        self._introduce(peak)
        progress = (
            Progress(deck.run.steps, self.state.step, log_every=deck.run.log_every, logger=self.log)
            if world.rank == 0
            else None
        )
        world.ledger.reset()
        if deck.run.trace:
            most = TRACED_SPANS // (deck.run.trace_steps * world.size)
            world.ledger.timeline = Timeline(deck.run.trace_steps, most)
        gc.collect()
        gc.freeze()  # what is there now stays: looking through it would hold up all ranks in turn
        try:
            while self.state.step < deck.run.steps:
                self._train_step(peak, metrics, progress)
            self.checkpoints.finish()
            self._finish(progress)
        finally:
            gc.unfreeze()
            world.ledger.timeline = None
            if progress is not None:
                progress.close()
            if metrics is not None:
                metrics.close()
            close_log(self.log)
            self.engine.close()
            if lock is not None:
                lock.close()
        return EXIT_DONE

    def _train_step(self, peak: float, metrics: MetricsWriter | None, progress: Progress | None) -> None:
        deck, state, world = self.deck, self.state, self.world
        if world.ledger.timeline is not None:
            world.ledger.timeline.begin(state.step + 1)
        started = time.perf_counter()
        first = not self.memory.activation_peak
        with self.memory.activations() if first else nullcontext():
            result = self.step(state, batch_at(deck.batch, state.step))
        seconds = time.perf_counter() - started
        self.checkpoints.provenance.note(state.step, result.loss, result.grad_norm)
        last = state.step == deck.run.steps
        every = deck.run.evaluate_every
        validation = None
        if self.corpus.validation is not None and (last or (every and state.step % every == 0)):
            if progress is not None:
                progress.working("evaluating")
            validation = self.step.evaluate(self.corpus.validation, deck.run.evaluate_sequences)
        if result.skipped:
            self.log.warning(
                "step %d: loss %g or gradient norm %g is not finite; update skipped on all ranks (%d so far)",
                state.step,
                result.loss,
                result.grad_norm,
                state.skipped,
            )
        with world.agreement():
            if metrics is not None and progress is not None:
                row = self._row(result, seconds, peak, validation)
                metrics.write(row)
                progress.step(row)
                if validation is not None:
                    progress.evaluation(state.step, validation)
        self.checkpoints.poll()
        if last or (deck.checkpoint.every and state.step % deck.checkpoint.every == 0):
            self.save(progress)

    def _row(self, result: StepResult, seconds: float, peak: float, validation: float | None) -> StepMetrics:
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
            mfu=rate * self.engine.shape.flops_per_token / (peak * self.world.size),
            peak_rss_bytes=peak_rss_bytes(),
            validation_loss=validation,
        )

    def save(self, progress: Progress | None) -> None:
        """Write a checkpoint of the present state, and the trace so far."""
        if progress is not None:
            progress.working("writing a checkpoint")
        self.checkpoints.save(self.state)
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

    def _measured_peak(self) -> float:
        """The mean over all ranks of the rate of a matrix product, FLOP/s."""
        rate = measure_gemm_flops(DTYPES[self.deck.precision.compute], self.world.device)
        everyone = self.world.everyone
        total = everyone.all_reduce(torch.tensor(rate, dtype=torch.float64))
        return float(total.item()) / everyone.size

    def _introduce(self, peak: float) -> None:
        shape, world, deck = self.engine.shape, self.world, self.deck
        axes = " x ".join(
            f"{axis} {self.mesh.size(axis)}" for axis in ("pipeline", "data", "context", "tensor")
        )
        lines = [
            f"{deck.run.title}: {shape.family}, {format_count(shape.parameters)} parameters, "
            f"{deck.precision.compute}, {counted(world.size, 'rank')} ({axes}) "
            f"on {counted(world.nodes, 'node')}",
            f"{deck.data.tokens}: {format_count(self.corpus.file.tokens)} tokens; a step takes "
            f"{format_count(deck.batch.global_size * deck.batch.sequence)}; "
            f"a matrix product runs at {peak / 1e9:.1f} GFLOP/s a rank (= 100% MFU)",
        ]
        if self.mesh.size("pipeline") > 1:
            lines.append(f"{deck.layout.schedule}: {self.engine.placement}")
        engine = self.engine
        stage = self.mesh.coordinate("pipeline")
        lines += introduce_keeping(deck, shape, engine.models, engine.plan, stage)
        if self.engine.offload.introduction:
            lines.append(self.engine.offload.introduction)
        lines += [line for line in (self.layout_check, self.started_from) if line]
        if self.checkpoints.newest is not None:
            lines.append(f"goes on from {self.checkpoints.newest} at step {self.state.step}")
        for line in lines:
            self.log.info("%s", line)
            if world.rank == 0:
                print(line, flush=True)

    def _finish(self, progress: Progress | None) -> None:
        measured = self.memory.measured()
        with self.world.agreement():
            if self.world.rank == 0:
                self.memory.write(self.folder, measured)
        if self.world.rank != 0:
            return
        self.world.ledger.write(self.folder / "ledger.json")
        trace, saved = self.folder / TRACE_FILE, self.checkpoints.newest
        lines = [
            f"metrics     {self.folder / 'metrics.jsonl'} (`hpctrain plot {self.folder}` draws them)",
            f"trace       {trace} (ui.perfetto.dev opens it)" if self.deck.run.trace else "",
            f"checkpoint  {saved} ({format_bytes(saved.stat().st_size)})" if saved else "",
            f"skipped     {self.state.skipped} steps" if self.state.skipped else "",
            *self.memory.table(measured),
        ]
        for line in filter(None, lines):
            self.log.info("%s", line)
            if progress is not None:
                progress.message(line)


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def run_deck(
    world: World, path: Path, overrides: Sequence[str], fresh: bool = False, again: bool = False
) -> int:
    """`hpctrain run`: train a deck, from its beginning; the exit code.

    With `again`, from the newest good checkpoint where its run folder has any, by the deck as it is now.
    """
    with world.agreement():
        deck = read_deck(path, overrides, read_source=settled_keys)
        folder = Path(deck.run.dir)
        begun = again and bool(checkpoints(folder / "checkpoints"))
    if any(world.everyone.all_gather_object(begun)):
        checkpoint = find_checkpoint(world, folder)
        return _go_on(world, deck, checkpoint, read_state(checkpoint, world.everyone))
    with world.agreement():
        if world.rank == 0:
            if fresh or (again and (folder / "deck.toml").exists()):
                remove_run(folder)  # with `again`, what a job left that ended before its first checkpoint
            elif not again:
                refuse_other_run(deck)
    return Run(world, deck).train()


def resume(world: World, target: Path, overrides: Sequence[str], strict: bool = False) -> int:
    """`hpctrain resume`: go on from a checkpoint, or from the newest good one of a run's folder.

    With `strict`, a run whose newest checkpoint is damaged does not go on.
    """
    path = find_checkpoint(world, target, strict)
    state = read_state(path, world.everyone)
    with world.agreement():
        require_training_state(path, state, overrides)
        deck = stored_deck(state, path, [f"run.dir={path.parent.parent}", *overrides])
    return _go_on(world, deck, path, state)


def _go_on(world: World, deck: Deck, path: Path, state: Mapping[str, Any]) -> int:
    """Train on from a checkpoint with that state; the exit code."""
    with world.agreement():
        same = deck.layout == stored_deck(state, path).layout
    return Run(world, deck, path, state.get("split") if same else None).train()
