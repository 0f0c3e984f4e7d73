"""Output of a run during training: log, metrics, terminal and status."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.report.terminal import columns, fit
from hpctrain.watch.dashboards import Dashboards
from hpctrain.watch.log import close_log, open_log
from hpctrain.watch.metrics import MetricsWriter, StepMetrics
from hpctrain.watch.progress import Progress
from hpctrain.watch.status import Status

_ACTIVITIES = {"evaluating": "evaluating", "checkpointing": "writing a checkpoint"}


class Reporter:
    """Writes the outputs of a run on rank 0. Other ranks only log warnings.

    Attributes:
        start: Step after which the run continues.
        log: Logger of the run.
        metrics: Metrics file, on rank 0.
        dashboards: Dashboards of the deck, on rank 0.
        progress: Output on the terminal, on rank 0 after `begin`.
        status: Status file.
        completed: True if the run ended as planned.
    """

    def __init__(self, world: World, deck: Deck, start: int, checkpoint: Path | None) -> None:
        """Open all files. Collective.

        Args:
            world: The ranks.
            deck: Deck of the run.
            start: Step after which the run continues.
            checkpoint: Checkpoint from which it continues; None for a new run.
        """
        self.world, self.deck, self.start = world, deck, start
        folder = Path(deck.run.dir)
        self.metrics: MetricsWriter | None = None
        self.dashboards: Dashboards | None = None
        self.completed = False
        self.progress: Progress | None = None
        with world.agreement():
            self.log = open_log(folder, world.rank)
            if world.rank == 0:
                self.metrics = MetricsWriter(folder / "metrics.jsonl", None if checkpoint is None else start)
                self.dashboards = Dashboards(deck, start)
        facts = {
            "title": deck.run.title,
            "started_in": str(Path.cwd()),
            "ranks": world.size,
            "nodes": world.nodes,
            "steps": deck.run.steps,
            "step": start,
            "checkpoint": _text(checkpoint),
            **({} if deck.data.dataset is None else {"counts": "samples"}),
        }
        self.status = Status(folder if world.rank == 0 else None, facts)

    def begin(self) -> None:
        """Show steps from now on."""
        if self.world.rank == 0:
            run = self.deck.run
            unit = "tokens" if self.deck.data.dataset is None else "samples"
            self.progress = Progress(
                run.steps, self.start, log_every=run.log_every, unit=unit, logger=self.log
            )

    def say(self, lines: Iterable[str]) -> None:
        """Write lines to the log and to the terminal."""
        for line in lines:
            self.log.info("%s", line)
            if self.progress is not None:
                self.progress.message(line)
            elif self.world.rank == 0:
                with suppress(OSError):  # the run continues without a terminal
                    print(*fit(line, columns()), sep="\n", flush=True)

    def working(self, state: Literal["evaluating", "checkpointing"]) -> None:
        """Show that an evaluation or a checkpoint takes time now."""
        if self.progress is not None:
            self.progress.working(_ACTIVITIES[state])
        self.status.change(state)

    def record_checkpoint(self, checkpoint: Path | None) -> None:
        """Record the newest complete checkpoint."""
        self.status.change("running", checkpoint=_text(checkpoint))

    def record_rollback(self, step: int) -> None:
        """Discard the metrics of later steps, since the run continues after an earlier step. Collective."""
        with self.world.agreement():
            if self.metrics is not None:
                self.metrics.roll_back(step)
            if self.dashboards is not None:
                self.dashboards.roll_back(step)

    def step(self, row: StepMetrics, longest: float, checkpoint: Path | None) -> None:
        """Record a completed step, on rank 0.

        Args:
            row: Metrics of the step.
            longest: Seconds of the longest recent step.
            checkpoint: Newest complete checkpoint.
        """
        assert self.metrics is not None
        assert self.dashboards is not None
        assert self.progress is not None
        self.metrics.write(row)
        self.dashboards.write(row.row)
        self.progress.step(row)
        for name, metrics in row.evaluated.items():
            self.log.info("%s", self.progress.evaluation(row.step, name, metrics))
        self.status.step(
            step=row.step,
            loss=row.loss,
            tokens_per_s=row.tokens_per_s,
            seconds_left=self.progress.seconds_left(),
            step_seconds=longest,
            checkpoint=_text(checkpoint),
            **({"noise_scale": row.metrics.get("noise_scale")} if "gradient_noise" in row.metrics else {}),
        )

    def close_progress(self) -> None:
        """End the bar, below which later lines are printed."""
        if self.progress is not None:
            self.progress.close()

    def record_end(self, checkpoint: Path | None, why: str = "", early: bool = False) -> None:
        """Record the end of a run without an error.

        Args:
            checkpoint: Newest complete checkpoint.
            why: Reason if the run ends before its last step, else "".
            early: True if the run is done nevertheless, for example since the loss does not fall anymore;
                False if it was stopped and can be resumed.
        """
        self.completed = True
        reason = {"reason": why} if why else {}
        if why and not early:
            self.status.change("stopped", checkpoint=_text(checkpoint), **reason)
        else:
            self.status.change("done", checkpoint=_text(checkpoint), seconds_left=0.0, **reason)

    def record_failure(self, error: BaseException, checkpoint: Path | None) -> None:
        """Record that an error ends the run."""
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, HpctrainError):
            reason = next(iter(error.problems), "its standard output was closed")
        elif isinstance(error, KeyboardInterrupt):
            reason = "interrupted a second time"
        self.status.change("failed", checkpoint=_text(checkpoint), reason=reason)

    def record_hang(self, reason: str) -> None:
        """Record that the watchdog ends the run. It calls this in its thread while the main thread hangs."""
        self.status.change("failed", reason=reason)

    def close(self) -> None:
        """Close all files."""
        self.close_progress()
        if self.dashboards is not None:
            self.dashboards.close(self.completed)
        if self.metrics is not None:
            self.metrics.close()
        self.status.close()
        close_log(self.log)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
