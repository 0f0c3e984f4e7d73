"""What a run tells while it trains: log, metrics, terminal and status."""

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
    """Rank 0 tells everything; the other ranks have a log for their warnings alone."""

    def __init__(self, world: World, deck: Deck, start: int, checkpoint: Path | None) -> None:
        """Open all files; collective. `start` is the step to go on from, and `checkpoint` its file."""
        self.world, self.deck, self.start = world, deck, start
        folder = Path(deck.run.dir)
        self.metrics: MetricsWriter | None = None
        self.dashboards: Dashboards | None = None
        self.whole = False
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
        """From here on steps are shown."""
        if self.world.rank == 0:
            run = self.deck.run
            unit = "tokens" if self.deck.data.dataset is None else "samples"
            self.progress = Progress(
                run.steps, self.start, log_every=run.log_every, unit=unit, logger=self.log
            )

    def say(self, lines: Iterable[str]) -> None:
        """Lines for the log and the terminal."""
        for line in lines:
            self.log.info("%s", line)
            if self.progress is not None:
                self.progress.message(line)
            elif self.world.rank == 0:
                with suppress(OSError):  # a screen that has gone away is no reason to end a run
                    print(*fit(line, columns()), sep="\n", flush=True)

    def working(self, state: Literal["evaluating", "checkpointing"]) -> None:
        """What takes long now."""
        if self.progress is not None:
            self.progress.working(_ACTIVITIES[state])
        self.status.change(state)

    def saved(self, checkpoint: Path | None) -> None:
        """A checkpoint was written, or begun; the newest complete one."""
        self.status.change("running", checkpoint=_text(checkpoint))

    def went_back(self, step: int) -> None:
        """The run goes on from the state after an earlier step. Collective."""
        with self.world.agreement():
            if self.metrics is not None:
                self.metrics.go_back(step)
            if self.dashboards is not None:
                self.dashboards.go_back(step)

    def step(self, row: StepMetrics, longest: float, checkpoint: Path | None) -> None:
        """A step that was done, on rank 0; `longest` are the seconds of the longest recent one."""
        assert self.metrics is not None
        assert self.dashboards is not None
        assert self.progress is not None
        self.metrics.write(row)
        self.dashboards.write(row.row)
        self.progress.step(row)
        for name, figures in row.evaluated.items():
            self.log.info("%s", self.progress.evaluation(row.step, name, figures))
        self.status.step(
            step=row.step,
            loss=row.loss,
            tokens_per_s=row.tokens_per_s,
            seconds_left=self.progress.seconds_left(),
            step_seconds=longest,
            checkpoint=_text(checkpoint),
            **({"noise_scale": row.figures.get("noise_scale")} if "gradient_noise" in row.figures else {}),
        )

    def stepped(self) -> None:
        """No other step comes: what is said from here on stands below the bar."""
        if self.progress is not None:
            self.progress.close()

    def ended(self, checkpoint: Path | None, why: str = "", early: bool = False) -> None:
        """All steps are done; or the run ends before, for a reason: `early` with nothing left to do, else
        stopped.
        """
        self.whole = True
        reason = {"reason": why} if why else {}
        if why and not early:
            self.status.change("stopped", checkpoint=_text(checkpoint), **reason)
        else:
            self.status.change("done", checkpoint=_text(checkpoint), seconds_left=0.0, **reason)

    def failed(self, error: BaseException, checkpoint: Path | None) -> None:
        """The run ends by an error; the newest complete checkpoint."""
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, HpctrainError):
            reason = next(iter(error.problems), "its standard output was closed")
        elif isinstance(error, KeyboardInterrupt):
            reason = "interrupted a second time"
        self.status.change("failed", checkpoint=_text(checkpoint), reason=reason)

    def hangs(self, reason: str) -> None:
        """The run ends by its watchdog, which calls this while the main thread hangs."""
        self.status.change("failed", reason=reason)

    def close(self) -> None:
        """Close all files."""
        self.stepped()
        if self.dashboards is not None:
            self.dashboards.close(self.whole)
        if self.metrics is not None:
            self.metrics.close()
        self.status.close()
        close_log(self.log)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
