"""Pictures of runs: loss, learning rate, throughput, norm, noise, load of experts, 8 bits, schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from hpctrain.errors import HpctrainError, InputOutputError, failing_as
from hpctrain.files import distinct
from hpctrain.report.axis import XAxis, axis_positions, missing_axis_key
from hpctrain.report.comparison import draw_comparison
from hpctrain.report.eight_bits import draw_losses
from hpctrain.report.fonts import drawable, drawing
from hpctrain.report.loads import draw_load
from hpctrain.report.marks import FAULTS_FILE, LOG_FILE, StepMark, marks_of, read_faults, read_log
from hpctrain.report.metric_rows import METRICS_FILE, Row, read_metrics
from hpctrain.report.palette import line_of
from hpctrain.report.recorded import TRACE_FILE, read_trace
from hpctrain.units import format_count, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]
Average = Literal["mean", "median"]

_INCHES = (8.0, 5.0)
DOTS_PER_INCH = 150
LEARNED = {"reward": "reward of an answer", "accuracy": "share of pairs"}
"""Metrics of some objectives that show progress better than the loss, and their units."""

_POINTS_UNSMOOTHED = 200
_POINTS_DRAWN = 20_000
_WINDOWS = 60
_SKIPPED_COLOUR = "#b00020"
_OTHER_MARKS = {"resumed": "^", "went back": "<", "fault": "D"}
_X_WORDS: dict[XAxis, str] = {"steps": "step", "tokens": "tokens", "time": "training time"}


@dataclass(frozen=True)
class PlottedRun:
    """Run that is drawn.

    Attributes:
        name: Name in the legend.
        rows: Rows of metrics.
        marks: Events at steps.
        axis: Horizontal axis.
    """

    name: str
    rows: list[Row]
    marks: Sequence[StepMark] = ()
    axis: XAxis = "steps"

    @property
    def label(self) -> str:
        """Name in pictures, with a note if seconds are those of an emulated link."""
        slowed = any("emulated_link" in row for row in self.rows)
        return drawable(self.name) + " (emulated link)" * slowed

    def series(self, key: str) -> tuple[Array, Array]:
        """Return positions on the axis and values of the rows with a number for `key`, both [points]."""
        at = self.positions
        points = [
            (at[row["step"]], row[key])
            for row in self.rows
            if isinstance(row.get(key), (int, float)) and row["step"] in at
        ]
        table = np.array(points, dtype=np.float64).reshape(-1, 2)
        table = table[np.isfinite(table[:, 1])]
        return table[:, 0], table[:, 1]

    @cached_property
    def positions(self) -> dict[int, float]:
        """Position of each step on the axis."""
        return axis_positions(self.rows, self.axis)

    def skipped(self) -> Array:
        """Return the positions of skipped steps, [skipped steps]."""
        return self._at(row["step"] for row in self.rows if row.get("skipped"))

    def marked(self, kind: str) -> Array:
        """Return the positions of the events of a kind, [marks]."""
        return self._at(mark.step for mark in self.marks if mark.kind == kind)

    def _at(self, steps: Iterable[int]) -> Array:
        return np.array([self.positions[step] for step in steps if step in self.positions], dtype=np.float64)


def plot_runs(
    run_dirs: Sequence[Path | str],
    out_dir: Path | str | None = None,
    *,
    log_loss: bool = False,
    axis: XAxis = "steps",
) -> list[Path]:
    """Draw the metrics of runs into PNG files, with all runs in each picture.

    Runs with experts also get a picture of their load, runs with products in 8 bits one of quantization
    losses, and runs of a pipeline with a trace one of the measured and simulated schedule.

    Args:
        run_dirs: Run folders.
        out_dir: Folder of the files; None for `plots/` in the run folder, or in the current folder for
            several runs.
        log_loss: True for a logarithmic axis of losses.
        axis: Horizontal axis.

    Returns:
        Paths of the files.

    Raises:
        HpctrainError: Folders have no metrics, or metrics lack the values of the axis. All problems are
            reported together.
        InputOutputError: Metrics are damaged, or files cannot be written.
    """
    folders = distinct(Path(run_dir) for run_dir in run_dirs)
    runs = load_runs(folders, axis)
    folder = Path(out_dir) if out_dir is not None else (folders[0] if len(runs) == 1 else Path()) / "plots"
    with failing_as(f"{folder}: pictures cannot be written"), drawing():
        figures = {
            **draw(runs, log_loss=log_loss),
            **draw_each("expert_load", draw_load, runs),
            **draw_each("fp8", draw_losses, runs),
            **draw_schedules(runs, folders),
        }
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for name, figure in figures.items():
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], dpi=DOTS_PER_INCH)
    return written


def load_runs(run_dirs: Sequence[Path], axis: XAxis = "steps") -> list[PlottedRun]:
    """Return rows and events of the runs, each with the shortest name that identifies it."""
    problems: list[str] = []
    unreadable = False
    tables: list[list[Row]] = []
    marks: list[list[StepMark]] = []
    for run_dir in run_dirs:
        path = run_dir / METRICS_FILE
        if not run_dir.exists():
            problems.append(f"{run_dir}: no such run folder")
            unreadable = True
        elif not run_dir.is_dir():
            problems.append(f"{run_dir}: is not a folder; name a run folder, such as runs/quickstart")
        elif not path.is_file():
            problems.append(f"{run_dir}: is not a run folder, since it has no {METRICS_FILE}")
        else:
            try:
                tables.append(read_metrics(path))
                marks.append(_marks(run_dir, tables[-1]))
            except InputOutputError as error:
                problems.extend(error.problems)
                unreadable = True
                continue
            if not tables[-1]:
                problems.append(f"{path}: has no step yet")
            elif key := missing_axis_key(tables[-1], axis):
                problems.append(f"{path}: its first row has no {key}; use --x steps")
    if problems:
        raise (InputOutputError if unreadable else HpctrainError)(problems)
    names = names_of(run_dirs)
    return [PlottedRun(*each, axis) for each in zip(names, tables, marks, strict=True)]


def _marks(run_dir: Path, rows: Sequence[Row]) -> list[StepMark]:
    """Return the events of a run; if its log or faults cannot be read, those in its metrics."""
    try:
        return marks_of(rows, read_log(run_dir / LOG_FILE), read_faults(run_dir / FAULTS_FILE))
    except InputOutputError:
        return marks_of(rows, (), ())


def draw(runs: Sequence[PlottedRun], *, log_loss: bool = False) -> dict[str, Figure]:
    """Return the figures of runs by name.

    These are loss, learning_rate, throughput (with MFU if measured) and grad_norm. If they were measured,
    there are also noise_scale and the metrics of LEARNED.
    """
    figures = {
        "loss": _loss(runs, log_loss=log_loss),
        "learning_rate": _learning_rate(runs),
        "throughput": _throughput(runs),
        "grad_norm": _grad_norm(runs),
    }
    if any(len(run.series("gradient_noise")[0]) for run in runs):
        figures["noise_scale"] = _noise_scale(runs)
    for key, unit in LEARNED.items():
        if any(len(run.series(key)[0]) for run in runs):
            figures[key] = _both(runs, key.capitalize(), key, unit)
    return figures


def draw_schedules(runs: Sequence[PlottedRun], run_dirs: Sequence[Path]) -> dict[str, Figure]:
    """Return a figure of the schedule for each run with a trace of a pipeline.

    It shows the middle one of the recorded steps, since the first one may warm up.
    """
    figures: dict[str, Figure] = {}
    for run, run_dir in zip(runs, run_dirs, strict=True):
        steps = read_trace(run_dir / TRACE_FILE) if (run_dir / TRACE_FILE).exists() else []
        if steps and steps[0].schedule.stage_count > 1:
            figures[_name_of("schedule", run, runs)] = draw_comparison(run.name, steps[len(steps) // 2])
    return figures


def draw_each(
    picture: str, draw_one: Callable[[str, Sequence[Row]], Figure | None], runs: Sequence[PlottedRun]
) -> dict[str, Figure]:
    """Return a figure for each run that `draw_one` can draw, by name."""
    drawn = {_name_of(picture, run, runs): draw_one(run.name, run.rows) for run in runs}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _name_of(picture: str, run: PlottedRun, runs: Sequence[PlottedRun]) -> str:
    return picture if len(runs) == 1 else f"{picture}_{run.name.replace('/', '_')}"


def _loss(runs: Sequence[PlottedRun], *, log_loss: bool) -> Figure:
    figure = _both(runs, "Loss", "loss", "loss (nats per token)")
    if log_loss:
        logarithmic(figure.axes[0])
    return figure


def _both(runs: Sequence[PlottedRun], title: str, key: str, unit: str) -> Figure:
    """Return a figure of a metric in training and on the validation split."""
    figure, (axes,) = make_figure(title, [unit], runs)
    for index, run in enumerate(runs):
        validation = run.series(f"validation_{key}")
        label = f"{run.label}, training" if len(runs) > 1 else "training"
        draw_curve(axes, run.series(key), index, label, "mean")
        # A policy's loss of evaluations is its reward with another sign, which has a figure of its own.
        if len(validation[0]) and not (key == "loss" and len(run.series("validation_reward")[0])):
            label = f"{run.label}, validation" if len(runs) > 1 else "validation"
            colour = f"C{index}" if len(runs) > 1 else "C1"
            style: dict[str, Any] = {"linestyle": "--", "marker": "o", "markersize": 4, "linewidth": 1.2}
            axes.plot(*validation, color=colour, label=label, **style)
    mark_events(axes, runs)
    add_legend(axes)
    return figure


def _learning_rate(runs: Sequence[PlottedRun]) -> Figure:
    figure, (axes,) = make_figure("Learning rate", ["learning rate"], runs)
    for index, run in enumerate(runs):
        axes.plot(*run.series("lr"), color=f"C{index}", linewidth=1.8, label=run.label)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    axes.set_ylim(bottom=0)
    add_legend(axes)
    return figure


def _throughput(runs: Sequence[PlottedRun]) -> Figure:
    from matplotlib.ticker import FuncFormatter

    measured = any(len(run.series("mfu")[0]) for run in runs)
    labels = ["tokens per second", "MFU (% of peak FLOP/s)"] if measured else ["tokens per second"]
    figure, panels = make_figure("Throughput", labels, runs)
    for index, run in enumerate(runs):
        draw_curve(panels[0], run.series("tokens_per_s"), index, run.label)
        if measured:
            draw_curve(panels[1], run.series("mfu"), index, run.label)
    panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    if measured:
        panels[1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    for axes in panels:
        axes.set_ylim(bottom=0)
    add_legend(panels[0])
    return figure


def _grad_norm(runs: Sequence[PlottedRun]) -> Figure:
    figure, (axes,) = make_figure("Gradient norm", ["global norm before clipping"], runs)
    spread = 1.0
    for index, run in enumerate(runs):
        steps, norms = run.series("grad_norm")
        draw_curve(axes, (steps, norms), index, run.label if len(runs) > 1 else "gradient norm")
        if len(norms) and (norms > 0).all():
            spread = max(spread, norms.max() / np.median(norms))
    if spread > 20:  # on a linear axis, one spike would flatten the rest of the curve
        logarithmic(axes)
    mark_events(axes, runs)
    add_legend(axes)
    return figure


def _noise_scale(runs: Sequence[PlottedRun]) -> Figure:
    labels = ["noise scale (sequences)", "squared gradient norm"]
    figure, (scale, squares) = make_figure("Gradient noise scale", labels, runs)
    dashed: dict[str, Any] = {"linestyle": "--", "linewidth": 1.2}
    for index, run in enumerate(runs):
        if not len(run.series("gradient_noise")[0]):
            continue
        of_run = f"{run.label}, " if len(runs) > 1 else ""
        colours = [f"C{index}"] * 2 if len(runs) > 1 else ["C0", "C1"]
        scale.plot(*run.series("noise_scale"), color=colours[0], linewidth=1.6, label=f"{of_run}noise scale")
        scale.plot(*run.series("batch"), color=colours[1], label=f"{of_run}batch", **dashed)
        signal, noise = run.series("gradient_signal"), run.series("gradient_noise")
        squares.plot(*signal, color=colours[0], linewidth=1.6, label=f"{of_run}true gradient")
        squares.plot(*noise, color=colours[1], label=f"{of_run}noise of a sequence", **dashed)
    for axes in (scale, squares):
        if any((np.asarray(line.get_ydata(), dtype=np.float64) > 0).any() for line in axes.lines):
            logarithmic(axes)
        add_legend(axes)
    return figure


def make_figure(title: str, labels: Sequence[str], runs: Sequence[PlottedRun]) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel for each label, one above the other, over the same steps."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=(_INCHES[0], _INCHES[1] + 1.5 * (len(labels) - 1)), layout="constrained")
    panels = list(figure.subplots(len(labels), 1, sharex=True, squeeze=False)[:, 0])
    heading = f"{title}: {runs[0].label}" if len(runs) == 1 else title
    panels[0].set_title(heading, fontsize=14, loc="left", pad=10)
    for axes, label in zip(panels, labels, strict=True):
        axes.set_ylabel(label, fontsize=12)
        axes.tick_params(labelsize=11)
        axes.grid(color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    axis = runs[0].axis
    panels[-1].set_xlabel(_X_WORDS[axis], fontsize=12)
    panels[-1].xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    if axis != "steps":
        written = format_count if axis == "tokens" else format_seconds
        panels[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value) if value else "0"))
    return figure, panels


def draw_curve(
    axes: Axes, series: tuple[Array, Array], index: int, label: str, average: Average = "median"
) -> None:
    """Draw a line; with many points a faint line and a smooth one over it."""
    steps, values = series
    _, dashes = line_of(index)
    style: dict[str, Any] = {"color": f"C{index}", **({"dashes": dashes} if dashes else {})}
    if len(values) <= _POINTS_UNSMOOTHED:
        axes.plot(steps, values, linewidth=1.6, marker="." if len(values) < 3 else None, label=label, **style)
        return
    every = -(-len(values) // _POINTS_DRAWN)
    axes.plot(steps[::every], values[::every], linewidth=0.6, alpha=0.3, **style)
    window = max(3, len(values) // _WINDOWS)
    centres, smooth = smoothed(values, window, average)
    axes.plot(steps[centres], smooth, linewidth=1.8, label=f"{label} ({average} of {window} steps)", **style)


def smoothed(
    values: Array, window: int, average: Average, points: int = 600
) -> tuple[npt.NDArray[np.int64], Array]:
    """Return at most `points` indices into values [n], and the average of `window` values around each."""
    last = len(values) - 1
    centres = np.unique(np.linspace(0, last, min(len(values), points)).astype(np.int64))
    take = np.mean if average == "mean" else np.median
    smooth = []
    for centre in centres:
        # At the start, where curves are steep, the window is symmetric. At the end it keeps all values before
        # the centre: a window of few values would make the curve fluctuate.
        left = min(centre, window // 2)
        right = min(last - centre, left)
        smooth.append(take(values[centre - left : centre + right + 1]))
    return centres, np.array(smooth)


def mark_events(axes: Axes, runs: Sequence[PlottedRun]) -> None:
    """Draw crosses at skipped steps, and other marks where a run was resumed, went back or met a fault."""
    for index, run in enumerate(runs):
        at = {"skipped steps": ("x", run.skipped())}
        at |= {kind: (marker, run.marked(kind)) for kind, marker in _OTHER_MARKS.items()}
        for words, (marker, steps) in at.items():
            if not len(steps):
                continue
            name = f"{run.label}, {words}" if len(runs) > 1 else words
            colour = f"C{index}" if len(runs) > 1 else _SKIPPED_COLOUR if marker in "xD" else "#404040"
            height = np.full(len(steps), 0.02 + 0.03 * index)
            style: dict[str, Any] = {"marker": marker, "markersize": 6, "linestyle": "none", "color": colour}
            label = f"{name} ({len(steps)})"
            axes.plot(steps, height, transform=axes.get_xaxis_transform(), label=label, **style)


def logarithmic(axes: Axes) -> None:
    """Set a logarithmic scale of values, with readable numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    within_decade = high < 10 * low
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7) if within_decade else (1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))  # noqa: ARG005


def add_legend(axes: Axes) -> None:
    """Add a legend if there is more than one label."""
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(fontsize=10, framealpha=0.85, edgecolor="none")


def names_of(run_dirs: Sequence[Path]) -> list[str]:
    """Return the last parts of paths, as few as identify the runs."""
    parts = [run_dir.resolve().parts for run_dir in run_dirs]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names
