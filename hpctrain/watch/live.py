"""`hpctrain status --watch`: a live table of runs that fits the window, until Ctrl-C."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from hpctrain.errors import EXIT_DONE
from hpctrain.report.sparkline import BLOCKS, LETTERS, sparkline
from hpctrain.report.terminal import live_console
from hpctrain.text import counted, escaped
from hpctrain.units import format_bytes, format_count, format_seconds
from hpctrain.watch.run_search import find_runs
from hpctrain.watch.run_view import RunView, RunViewer
from hpctrain.watch.status import ACTIVE

if TYPE_CHECKING:
    from rich.text import Text

SECONDS_PER_UPDATE = 2.0
UPDATES_PER_SEARCH = 10
"""Number of updates after which new runs are searched."""

_BUSY_SHARE = 0.2
"""Largest share of time that is spent on reading, if a file system is slow."""

_WIDE, _CURVES, _GAP = 100, (8, 16), "  "
"""Width of windows from which on curves are longer, both lengths of curves, and space between columns."""

_MIN_NAME_WIDTH, _SMALLEST_NAME_WIDTH = 20, 8
"""Widths that the names of runs keep: the first while optional columns are left, the second afterwards."""

_LAST_REQUIRED_COLUMN = 5
"""Largest `removal_order` of a column that is not optional."""

_STYLES = {
    "stalled": "bold red",
    "lost": "bold red",
    "failed": "bold red",
    "stopped": "yellow",
    "done": "dim",
}


@dataclass(frozen=True)
class Style:
    """Style of curves.

    Attributes:
        marks: Characters by height.
        curve: Number of characters of a curve.
    """

    marks: str
    curve: int


@dataclass(frozen=True)
class TableColumn:
    """Column of the table. A column whose cells are all empty is left out.

    Attributes:
        head: Title of the column.
        cell: Function that returns the cell of a run.
        left: True if cells are aligned to the left.
        removal_order: In a narrow window, the column with the largest number is removed first.
    """

    head: str
    cell: Callable[[RunView, Style], str]
    left: bool
    removal_order: int


def watch_runs(folders: Sequence[Path]) -> int:
    """Show these runs, or all below the current folder, until a signal ends it. Return the exit code."""
    from rich.console import Group
    from rich.live import Live

    console = live_console()
    marks = BLOCKS if "utf" in console.encoding.lower() else LETTERS
    watched = WatchedRuns(folders)
    lines: list[Text] = []
    with ended_by_signals() as request:
        with Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live:
            while not request.is_set:
                start = time.monotonic()
                lines = watched.lines(console.width, console.height, marks)
                live.update(Group(*lines), refresh=True)
                request.wait(max(SECONDS_PER_UPDATE, (time.monotonic() - start) / _BUSY_SHARE))
        console.print(*lines, sep="\n")  # leave the last table on the normal screen
    return EXIT_DONE


class WatchedRuns:
    """Runs of the table.

    Args:
        folders: Run folders; if empty, all run folders below `root`.
        root: Folder that is searched.
    """

    def __init__(self, folders: Sequence[Path], root: Path = Path()) -> None:
        self._folders, self._root = folders, root
        self._viewers: dict[Path, RunViewer] = {}
        self._updates, self._is_search_complete = 0, True

    def views(self, most: int) -> tuple[list[RunView], int]:
        """Return views of the first `most` runs, those with a job first, and the number of all runs."""
        if self._updates % UPDATES_PER_SEARCH == 0:
            folders = self._folders
            if not folders:
                search = find_runs(self._root)
                folders, self._is_search_complete = search.folders, search.is_complete
            self._viewers = {each: self._viewers.get(each) or RunViewer(each) for each in folders}
        self._updates += 1
        views = [viewer.status() for viewer in self._viewers.values()]
        views.sort(key=lambda view: view.status.get("state") not in {*ACTIVE, "stalled"})
        return [self._viewers[view.folder].with_details(view) for view in views[:most]], len(views)

    def lines(self, width: int, height: int, marks: str = BLOCKS) -> list[Text]:
        """Return the lines that a window of this size shows now."""
        from rich.text import Text

        views, count = self.views(max(1, height - 5))
        busy = sum(view.status.get("state") in ACTIVE for view in views)
        more = "" if self._is_search_complete else " and more"
        title = f"{counted(count, 'run')}{more}, {busy} running  {time.strftime('%H:%M:%S')}  Ctrl-C ends"
        if not views:
            title = f"no runs below {self._root.absolute()} yet  {time.strftime('%H:%M:%S')}  Ctrl-C ends"
        rows = table_lines(views, width, marks)
        texts = [(title, "bold"), *rows, *((line, "dim") for line in _footer(views, count))]
        return [Text(_cut(escaped(text), width, marks), style, no_wrap=True) for text, style in texts]


def table_lines(views: Sequence[RunView], width: int, marks: str = BLOCKS) -> list[tuple[str, str]]:
    """Return the lines of the table with their styles.

    If the table is wider than the window, the least important columns are removed first. At last, names of
    runs are cut at their left end.

    Args:
        views: Views of the runs.
        width: Width of the window.
        marks: Characters of curves.
    """
    if not views:
        return []
    curve_style = Style(marks, _CURVES[width >= _WIDE])
    columns = [each for each in COLUMNS if any(each.cell(view, curve_style) for view in views)]
    cells = {each: [each.head, *(each.cell(view, curve_style) for view in views)] for each in columns}
    widths = {each: max(map(len, cells[each])) for each in columns}
    while sum(widths[each] for each in columns) + len(_GAP) * (len(columns) - 1) > width:
        least = max(columns, key=lambda each: each.removal_order)
        rest = width - sum(widths[each] + len(_GAP) for each in columns if each.removal_order)
        min_width = _MIN_NAME_WIDTH if least.removal_order > _LAST_REQUIRED_COLUMN else _SMALLEST_NAME_WIDTH
        if rest >= min_width or not least.removal_order:
            widths[COLUMNS[0]] = max(rest, 1)
            break
        columns.remove(least)
    cells[COLUMNS[0]] = [
        cells[COLUMNS[0]][0],
        *(_tail(name, widths[COLUMNS[0]], marks) for name in cells[COLUMNS[0]][1:]),
    ]
    lines = []
    for number in range(len(views) + 1):
        texts = [
            cells[each][number].ljust(widths[each]) if each.left else cells[each][number].rjust(widths[each])
            for each in columns
        ]
        state = views[number - 1].status.get("state") if number else ""
        style = _STYLES.get(str(state), "") if number else "bold"
        lines.append((_GAP.join(texts).rstrip(), style))
    return lines


def _footer(views: Sequence[RunView], count: int) -> Iterator[str]:
    """Yield the lines below the table: number of runs that do not fit, free disk space, unreadable runs."""
    if count > len(views):
        yield f"{count - len(views)} more do not fit into the window"
    disks = {view.disk.device: (view.disk.free, str(view.folder)) for view in views if view.disk is not None}
    if len(disks) == 1:
        yield f"free on the disk: {format_bytes(next(iter(disks.values()))[0])}"
    elif disks:
        yield "free on disks: " + ", ".join(f"{format_bytes(free)} ({path})" for free, path in disks.values())
    for view in views:
        if view.problem:
            yield view.problem


def _step(view: RunView, style: Style) -> str:  # noqa: ARG001
    steps = view.status.get("steps")
    return f"{view.status.get('step', 0)}/{'?' if steps is None else steps}" if view.status else ""


def _loss(view: RunView, style: Style) -> str:  # noqa: ARG001
    loss = _number(view.status, "loss")
    return "" if loss is None else f"{loss:.4f}"


def _rate(view: RunView, style: Style) -> str:  # noqa: ARG001
    rate = _number(view.status, "tokens_per_s")
    return "" if rate is None or not _is_active(view) else format_count(rate)


def _left(view: RunView, style: Style) -> str:  # noqa: ARG001
    left = _number(view.status, "seconds_left")
    return "" if left is None or not _is_active(view) else format_seconds(round(left))


def _ago(view: RunView, style: Style) -> str:  # noqa: ARG001
    since = _number(view.status, "seconds_since_step")
    return "" if since is None or not _is_active(view) else format_seconds(round(since))


def _slow(view: RunView, style: Style) -> str:  # noqa: ARG001
    """Return the number of the straggler, or how many ranks are stragglers."""
    slow = view.status.get("stragglers")
    if not isinstance(slow, list) or not slow or not _is_active(view):
        return ""
    first = slow[0] if isinstance(slow[0], dict) else {}
    return f"rank {first.get('rank', '?')}" if len(slow) == 1 else counted(len(slow), "rank")


def _faults(view: RunView, style: Style) -> str:  # noqa: ARG001
    faults = _number(view.status, "silent_faults")
    return f"{faults:.0f}" if faults else ""


def _is_active(view: RunView) -> bool:
    return view.status.get("state") in {*ACTIVE, "stalled"}


def _number(status: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a status; None if it is missing or not a number."""
    value = status.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


COLUMNS = (
    TableColumn("run", lambda view, _: escaped(str(view.folder)), left=True, removal_order=0),
    TableColumn(
        "state", lambda view, _: str(view.status.get("state", "unreadable")), left=True, removal_order=1
    ),
    TableColumn("step", _step, left=False, removal_order=2),
    TableColumn("loss", _loss, left=False, removal_order=3),
    TableColumn(
        "curve",
        lambda view, style: sparkline(view.losses, style.curve, style.marks),
        left=True,
        removal_order=7,
    ),
    TableColumn("tokens/s", _rate, left=False, removal_order=8),
    TableColumn("left", _left, left=False, removal_order=4),
    TableColumn("last step", _ago, left=False, removal_order=9),
    TableColumn("slow", _slow, left=True, removal_order=6),
    TableColumn("faults", _faults, left=False, removal_order=5),
    TableColumn(
        "disk",
        lambda view, _: "" if view.disk is None else format_bytes(view.disk.used),
        left=False,
        removal_order=10,
    ),
)


def _cut(text: str, width: int, marks: str) -> str:
    """Return a text, cut at its end to a width."""
    dots = "…" if marks == BLOCKS else "~"
    return text if len(text) <= width else text[: max(0, width - 1)] + dots


def _tail(text: str, width: int, marks: str) -> str:
    """Return a name, cut at its beginning to a width. The ends of names differ most."""
    dots = "…" if marks == BLOCKS else "~"
    return text if len(text) <= width else dots + text[len(text) - width + 1 :]


class EndRequest:
    """Request to end, which a signal handler can set at any time.

    `threading.Event.set` takes a lock. A handler that interrupts `wait` in the same thread would deadlock. A
    SimpleQueue allows `put` inside of its own calls.

    Attributes:
        is_set: True if the end was requested.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Request the end. Signal handlers may call it."""
        self.is_set = True
        self._woken.put(None)

    def wait(self, seconds: float) -> None:
        """Wait until the end is requested, at most for `seconds`."""
        with suppress(queue.Empty):
            self._woken.get(timeout=seconds)


@contextmanager
def ended_by_signals() -> Iterator[EndRequest]:
    """Return a context manager in which Ctrl-C and SIGTERM set an EndRequest.

    So the screen can be restored. A second signal raises KeyboardInterrupt.
    """
    request = EndRequest()

    def handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if request.is_set:
            raise KeyboardInterrupt
        request.set()

    before = {each: signal.signal(each, handle) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
