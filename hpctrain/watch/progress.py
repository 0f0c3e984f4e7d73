"""Output of rank 0 during training: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TextIO

from hpctrain.deck.sections.evaluation import VALIDATION
from hpctrain.report.terminal import DEFAULT_COLUMNS, Terminal, bar_console, columns, find_terminal, fit
from hpctrain.units import format_count, format_seconds
from hpctrain.watch.evaluation_text import evaluation_line, notable_metrics
from hpctrain.watch.log import show_warnings
from hpctrain.watch.metrics import StepMetrics

if TYPE_CHECKING:
    from rich.console import Console

Style = Literal["auto", "bar", "lines"]

STYLE_VARIABLE = "HPCTRAIN_PROGRESS"
"""Environment variable that replaces the style "auto"."""

_SECONDS_PER_DRAWING = 0.1
_STEPS_OF_AVERAGE = 100
_BAR_COLUMNS = (8, 40)
_LESS_THAN_BAR = 3
"""Fields with a rank of importance above this are removed before the bar."""


@dataclass(frozen=True)
class ProgressDisplay:
    """Style and place of the output of a Progress.

    Attributes:
        style: "bar" for a live bar, "lines" for lines, "auto" for a bar on a terminal. The environment
            variable HPCTRAIN_PROGRESS replaces "auto".
        output: Stream to write to; None for stdout.
        terminal: Terminal of the output; None to look for one.
        clock: Function that returns seconds.
    """

    style: Style = "auto"
    output: TextIO | None = None
    terminal: Terminal | None = None
    clock: Callable[[], float] = time.monotonic


class Progress:
    """Shows the steps of a run on rank 0. Nothing else may print at the same time.

    If the output can no longer be written, for example because the terminal was closed, nothing is shown
    anymore, and the run continues.

    Args:
        steps: Last step of the run.
        start: Step after which the run continues.
        log_every: Number of steps after which a line is printed.
        unit: What the run counts: "tokens" or "samples".
        logger: Logger whose warnings are shown above the bar.
        display: Style and place of the output; None for a bar or lines on stdout.

    Attributes:
        style: Style in use.
    """

    def __init__(
        self,
        steps: int,
        start: int = 0,
        *,
        log_every: int = 10,
        unit: str = "tokens",
        logger: logging.Logger | None = None,
        display: ProgressDisplay | None = None,
    ) -> None:
        display = display or ProgressDisplay()
        terminal = display.terminal
        self.steps = steps
        self.start = start
        self.log_every = max(1, log_every)
        self._unit = unit
        self._output: TextIO | None = sys.stdout if display.output is None else display.output
        self._clock = display.clock
        self._start_time = display.clock()
        self._logger = logger
        self._stamps: deque[float] = deque(maxlen=_STEPS_OF_AVERAGE + 1)
        self._latest: StepMetrics | None = None
        self._validation: float | None = None
        self._skipped = 0
        self._activity = ""
        self._drawn = -math.inf
        self._closing = False
        if terminal is None and display.style != "lines":
            terminal = find_terminal()
        self.style = _choose(display.style, terminal)
        self._terminal = terminal
        self._console: Console | None = None
        if self.style == "bar":
            self._console = bar_console(self._output)
            if logger is not None and terminal is not None and terminal.takes_errors:
                show_warnings(logger, self.message)
            self._draw()

    def step(self, metrics: StepMetrics) -> None:
        """Show a completed step. It takes a few microseconds, unless the bar is drawn."""
        now = self._clock()
        self._stamps.append(now)
        self._latest = metrics
        self._activity = ""
        self._skipped += metrics.skipped
        if metrics.validation_loss is not None:
            self._validation = metrics.validation_loss
        if self.style == "bar":
            if now - self._drawn >= _SECONDS_PER_DRAWING or metrics.step == self.steps:
                self._draw()
        elif metrics.step in {self.start + 1, self.steps} or metrics.step % self.log_every == 0:
            self._write(self._line(metrics) + "\n")

    def evaluation(self, step: int, name: str, metrics: Mapping[str, float]) -> str:
        """Show the metrics of a set that was evaluated after a step. Return the line."""
        if name == VALIDATION:
            self._validation = metrics["loss"]
        line = f"{self._count(step)}  {evaluation_line(name, metrics)}"
        self.message(line)
        return line

    def message(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.style == "bar":
            width = None if self._terminal is None else self._terminal.columns()
            shown = "\n".join(fit(text, width))
            self._write(f"\r\x1b[K{shown}\n")
            self._draw()
        else:
            self._write("\n".join(fit(text, columns())) + "\n")

    def working(self, activity: str) -> None:
        """Show an activity such as "evaluating" on the bar until the next step. Lines do not show it."""
        if self.style == "bar":
            self._activity = activity
            self._draw()

    def seconds_left(self) -> float | None:
        """Return the expected seconds of the remaining steps, by the mean of the last hundred steps."""
        if self._latest is None:
            return None
        passed = len(self._stamps) - 1
        each = (self._stamps[-1] - self._stamps[0]) / passed if passed else self._latest.seconds
        return each * max(0, self.steps - self._latest.step)

    def close(self) -> None:
        """Draw the bar for the last time, and let warnings go to stderr again."""
        if self._console is not None:
            self._activity, self._closing = "", True
            self._draw()
            self._write("\n")
            self._console = None
            self.style = "lines"
            if self._logger is not None:
                show_warnings(self._logger, None)

    def _count(self, step: int) -> str:
        return f"step {step:>{len(str(self.steps))}}/{self.steps}"

    def _line(self, metrics: StepMetrics) -> str:
        noise, values = "", metrics.metrics
        if "gradient_noise" in values:
            scale = format_count(values["noise_scale"]) if "noise_scale" in values else "-"
            noise = f"noise scale {scale:>5}"
        texts = [
            self._count(metrics.step),
            f"loss {_number(metrics.loss, 4):>7}",
            *notable_metrics(values),
            f"grad norm {_number(metrics.grad_norm, 3):>7}",
            f"lr {metrics.lr:.2e}",
            "" if metrics.epoch is None else f"epoch {metrics.epoch:.2f}",
            f"{format_count(metrics.tokens_per_s):>5} {self._unit}/s",
            "" if metrics.mfu is None else f"mfu {metrics.mfu:4.0%}",
            noise,
            self._time(metrics, "left {}", "took {}"),
            "(skipped)" if metrics.skipped else f"({self._skipped} skipped)" if self._skipped else "",
        ]
        return "  ".join(filter(None, texts))

    def _time(self, metrics: StepMetrics, left: str, took: str) -> str:
        if metrics.step >= self.steps:
            return took.format(_format_seconds(self._clock() - self._start_time))
        return left.format(_format_seconds(self.seconds_left() or 0))

    def _bar_fields(self) -> list[tuple[int, str, str]]:
        """Return the fields of the bar from left to right: (rank of importance from 0, style, text)."""
        metrics = self._latest
        if metrics is None:
            activity = self._activity or ("no step was made" if self._closing else "starting")
            return [(0, "bold", self._count(self.start)), (1, "cyan", activity)]
        validation = "" if self._validation is None else f"validation {_number(self._validation, 4)}"
        fields = [
            (0, "bold", self._count(metrics.step)),
            (1, "red" if metrics.skipped else "green", f"loss {_number(metrics.loss, 4)}"),
            *((1, "green", words) for words in notable_metrics(metrics.metrics)[:1]),
            (5, "green", validation),
            (6, "", f"grad norm {_number(metrics.grad_norm, 3)}"),
            (3, "", f"{format_count(metrics.tokens_per_s):>5} {self._unit}/s"),
            (7, "", "" if metrics.mfu is None else f"mfu {metrics.mfu:.0%}"),
            (4, "red", f"{self._skipped} skipped" if self._skipped else ""),
            (2, "cyan", self._activity or self._time(metrics, "{} left", "in {}")),
        ]
        return [field for field in fields if field[2]]

    def _draw(self) -> None:
        if self._console is None or self._output is None:
            return
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        # A line that fills the last column would make some terminals wrap.
        width = (DEFAULT_COLUMNS if self._terminal is None else self._terminal.columns()) - 1
        fields = self._bar_fields()
        while _columns(fields) > width - _BAR_COLUMNS[0] - 1 and max(fields)[0] > _LESS_THAN_BAR:
            fields.remove(max(fields))
        while _columns(fields) > width and len(fields) > 1:
            fields.remove(max(fields))
        console = self._console
        console.width = width + 1
        bar = min(_BAR_COLUMNS[1], width - _columns(fields) - 1)
        with console.capture() as drawing:
            for index, (_, style, text) in enumerate(fields):
                if index == 1 and bar >= _BAR_COLUMNS[0]:
                    done = self.start if self._latest is None else self._latest.step
                    console.print(" ", ProgressBar(self.steps, done, width=bar), sep="", end="")
                gap = "  " if index else ""
                console.print(Text(gap + text, style)[:width], end="", no_wrap=True, crop=False)
        self._write(f"\r{drawing.get()}\x1b[K")
        self._drawn = self._clock()

    def _write(self, text: str) -> None:
        if self._output is None:
            return
        encoding = getattr(self._output, "encoding", None) or "utf-8"
        try:
            self._output.write(text.encode(encoding, "replace").decode(encoding))
            self._output.flush()
        except (OSError, ValueError):
            self._output = None


def _choose(style: Style, terminal: Terminal | None) -> Literal["bar", "lines"]:
    if style == "auto":
        variable = os.environ.get(STYLE_VARIABLE, "").strip().lower()
        has_no_terminal = terminal is None or os.environ.get("TERM", "dumb") in {"", "dumb", "unknown"}
        style = "bar" if variable == "bar" or (variable != "lines" and not has_no_terminal) else "lines"
    return style


def _columns(fields: list[tuple[int, str, str]]) -> int:
    return sum(len(text) for _, _, text in fields) + 2 * (len(fields) - 1)


def _number(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}" if not math.isfinite(value) or abs(value) < 1000 else f"{value:.1e}"


def _format_seconds(seconds: float) -> str:
    return format_seconds(max(1, round(seconds)))
