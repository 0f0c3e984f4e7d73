"""Table and pictures of a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.plan.planned_sweep import PlannedPoint, PlannedSweep, short_reason
from hpctrain.plan.sweep_arguments import RANKS
from hpctrain.plan.time.time_text import WHAT
from hpctrain.report.figures import write_figure
from hpctrain.report.pareto import LayoutCandidate, draw_pareto
from hpctrain.report.scaling import PlannedBar, draw_causes, draw_scaling
from hpctrain.report.terminal import columns, fit
from hpctrain.text import counted, fitted, table
from hpctrain.units import format_bytes, format_count, format_seconds

_REASON_CHARACTERS = 90
"""Largest number of characters of a reason in a table."""
_CAUSES = 2
"""Number of causes of the step time that are shown for each point."""
_TOKENS = 1_000_000
"""Number of tokens whose time is drawn if steps of different points have different numbers of tokens."""


def sweep_text(sweep: PlannedSweep) -> str:
    """Return a table with one row per point, and the fastest point that fits."""
    where = "" if sweep.machine is None else f" on {sweep.machine}"
    grows = ", batch.global_size grows with the ranks" if sweep.weak else ""
    lines = [f"{sweep.title}: {counted(len(sweep.points), 'point')}{where}{grows}", ""]
    timed = sweep.machine is not None
    head = [
        *_names(sweep),
        *(["step", "tokens/s", "TFLOP/s", "MFU"] if timed else []),
        "memory per rank",
        "fits",
    ]
    rows = [[*head, "largest causes" if timed else ""]]
    for point in sweep.points:
        values = [value for _, value in point.changes]
        if point.memory is None:
            rows.append([*values, *[""] * (len(head) - len(values)), _clipped(short_reason(point.problem))])
        else:
            rows.append([*values, *_step_cells(point), format_bytes(point.total_bytes), *_last_cells(point)])
    lines += _fitted_rows(rows, len(sweep.sweeps), columns())
    best = min(
        (point for point in sweep.planned if point.step is not None and point.fits is not False),
        key=lambda point: point.step.seconds / point.step.tokens if point.step is not None else 0.0,
        default=None,
    )
    if timed and best is None:
        lines += ["", "No point fits into memory."]
    elif best is not None and best.step is not None:
        fits = "that fits " if best.fits else ""
        speed = format_count(best.step.tokens / best.step.seconds)
        lines += ["", *fit(f"The fastest {fits}is {point_name(best)}: {speed} tokens/s.", columns())]
    return "\n".join(lines) + "\n"


def _fitted_rows(rows: Sequence[Sequence[str]], keys: int, width: int | None) -> list[str]:
    """Return the lines of a table whose first columns are swept keys.

    If the table is too wide, these columns become one that names keys and values: "zero = 0, tensor = 2".
    """
    lines = table(rows, {*range(keys), len(rows[0]) - 1})
    if width is None or all(len(line) <= width for line in lines):
        return lines
    names = rows[0][:keys]
    named = [", ".join(map(" = ".join, zip(names, row[:keys], strict=True))) for row in rows[1:]]
    joined = [[name, *row[keys:]] for name, row in zip(["point", *named], rows, strict=True)]
    return fitted(joined, {0, len(joined[0]) - 1}, width)


def _names(sweep: PlannedSweep) -> list[str]:
    """Return the swept keys, without their sections if this is unambiguous."""
    count = Counter(each.short for each in sweep.sweeps)
    return [each.short if count[each.short] == 1 else each.key for each in sweep.sweeps]


def _step_cells(point: PlannedPoint) -> list[str]:
    step = point.step
    if step is None:
        return []
    return [
        format_seconds(step.seconds),
        format_count(step.tokens / step.seconds),
        f"{step.flops_per_rank / 1e12:.3g}",
        f"{100 * step.mfu:.1f}%",
    ]


def _last_cells(point: PlannedPoint) -> list[str]:
    fits = {None: "?", True: "yes", False: "no"}[point.fits]
    if point.step is None:
        return [fits, ""]
    largest = sorted(point.step.seconds_by_cause.items(), key=lambda each: -each[1])[:_CAUSES]
    causes = (f"{cause} {100 * seconds / point.step.seconds:.0f}%" for cause, seconds in largest if seconds)
    return [fits, ", ".join(causes)]


def _clipped(text: str) -> str:
    return text if len(text) <= _REASON_CHARACTERS else f"{text[: _REASON_CHARACTERS - 3]}..."


def point_name(point: PlannedPoint) -> str:
    """Return the keys and values of a point, such as "tensor = 4, zero = 1"."""
    return ", ".join(f"{key.rpartition('.')[2]} = {value}" for key, value in point.changes)


def plot_sweep(sweep: PlannedSweep, path: Path, pareto: bool = False) -> None:
    """Draw the seconds of a sweep by cause, over ranks or for each point; with `pareto`, memory against time.

    Raises:
        HpctrainError: There are no step times, or the file name does not end like that of a picture.
        InputOutputError: The file cannot be written.
    """
    if sweep.machine is None:
        raise HpctrainError("--plot requires --machine NAME|FILE, since there are no step times to plot")
    title = f"{sweep.title} on {sweep.machine}"
    if pareto:
        timed = [(point, point.step) for point in sweep.planned if point.step is not None]
        have_equal_tokens = len({step.tokens for _, step in timed}) == 1
        candidates = [
            LayoutCandidate(
                point_name(point),
                step.seconds * (1 if have_equal_tokens else _TOKENS / step.tokens),
                point.total_bytes,
                point.limit,
            )
            for point, step in timed
        ]
        heading, of = f"{title}: memory against time", "step" if have_equal_tokens else "million tokens"
        write_figure(path, lambda: draw_pareto(heading, candidates, of))
        return
    over_ranks = [each.key for each in sweep.sweeps] == [RANKS]
    bars = [_bar(point, over_ranks) for point in sweep.planned]
    if over_ranks:
        kind = "weak" if sweep.weak else "strong"
        write_figure(path, lambda: draw_scaling(f"{title}: {kind} scaling", bars))
    else:
        write_figure(path, lambda: draw_causes(title, bars))


def _bar(point: PlannedPoint, over_ranks: bool) -> PlannedBar:
    assert point.step is not None
    causes = {WHAT[cause]: seconds for cause, seconds in point.step.seconds_by_cause.items()}
    name = str(point.ranks) if over_ranks else point_name(point).replace(", ", "\n")
    label = name if point.fits is not False else f"{name}\ndoes not fit"
    return PlannedBar(label, point.ranks, causes, point.step.tokens / point.step.seconds)
