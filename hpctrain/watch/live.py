"""`hpctrain status --watch`: a live table of runs, in any window, until Ctrl-C."""

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
from hpctrain.watch.found_runs import find_runs
from hpctrain.watch.look import Look, Looker
from hpctrain.watch.status import ACTIVE

if TYPE_CHECKING:
    from rich.text import Text

SECONDS_PER_LOOK = 2.0
LOOKS_PER_SEARCH = 10  # for runs that were not there before
_SHARE = 0.2  # of the time at most is spent on looking, where a file system is slow
_WIDE, _CURVES, _GAP = 100, (8, 16), "  "  # from so many columns on, curves are longer
_NAME, _LEAST_NAME, _NEEDED = 20, 8, 5
"""Letters of a run's name that stay as long as there are columns which are not needed, and in any case."""

_STYLES = {
    "stalled": "bold red",
    "lost": "bold red",
    "failed": "bold red",
    "stopped": "yellow",
    "done": "dim",
}


@dataclass(frozen=True)
class Style:
    """How curves are drawn: by which marks, and how many."""

    marks: str
    curve: int


@dataclass(frozen=True)
class TableColumn:
    """A column: its head, the cell of a run, whether cells begin at its left, and how soon it has to go where
    the window is narrow; "" in all rows is no column at all.
    """

    head: str
    cell: Callable[[Look, Style], str]
    left: bool
    goes: int


def watch_runs(folders: Sequence[Path]) -> int:
    """Show these runs, or all below here, until somebody ends it; the exit code."""
    from rich.console import Group
    from rich.live import Live

    console = live_console()
    marks = BLOCKS if "utf" in console.encoding.lower() else LETTERS
    watched = WatchedRuns(folders)
    lines: list[Text] = []
    with ended_by_signals() as ended:
        with Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live:
            while not ended.asked:
                began = time.monotonic()
                lines = watched.lines(console.width, console.height, marks)
                live.update(Group(*lines), refresh=True)
                ended.wait(max(SECONDS_PER_LOOK, (time.monotonic() - began) / _SHARE))
        console.print(*lines, sep="\n")  # the last table stays, where the screen was before
    return EXIT_DONE


class WatchedRuns:
    """The runs that are looked at: those of these folders, or where there are none, all below here."""

    def __init__(self, folders: Sequence[Path], root: Path = Path()) -> None:
        self._folders, self._root = folders, root
        self._lookers: dict[Path, Looker] = {}
        self._looks, self._all_seen = 0, True

    def looks(self, most: int) -> tuple[list[Look], int]:
        """The first `most` runs in full, those that have a job before others; and how many there are."""
        if self._looks % LOOKS_PER_SEARCH == 0:
            folders = self._folders
            if not folders:
                found = find_runs(self._root)
                folders, self._all_seen = found.folders, found.all_seen
            self._lookers = {each: self._lookers.get(each) or Looker(each) for each in folders}
        self._looks += 1
        looks = [looker.status() for looker in self._lookers.values()]
        looks.sort(key=lambda look: look.status.get("state") not in {*ACTIVE, "stalled"})
        return [self._lookers[look.folder].all_of(look) for look in looks[:most]], len(looks)

    def lines(self, width: int, height: int, marks: str = BLOCKS) -> list[Text]:
        """What a window of that size shows now."""
        from rich.text import Text

        looks, count = self.looks(max(1, height - 5))
        busy = sum(look.status.get("state") in ACTIVE for look in looks)
        more = "" if self._all_seen else " and more"
        title = f"{counted(count, 'run')}{more}, {busy} running  {time.strftime('%H:%M:%S')}  Ctrl-C ends"
        if not looks:
            title = f"no runs below {self._root.absolute()} yet  {time.strftime('%H:%M:%S')}  Ctrl-C ends"
        rows = table_lines(looks, width, marks)
        texts = [(title, "bold"), *rows, *((line, "dim") for line in _foot(looks, count))]
        return [Text(_cut(escaped(text), width, marks), style, no_wrap=True) for text, style in texts]


def table_lines(looks: Sequence[Look], width: int, marks: str = BLOCKS) -> list[tuple[str, str]]:
    """The lines of the table with their styles, for a window of that width: of what does not fit, the least
    important columns go first, and names of runs are shortened from the left at last.
    """
    if not looks:
        return []
    drawn = Style(marks, _CURVES[width >= _WIDE])
    columns = [each for each in COLUMNS if any(each.cell(look, drawn) for look in looks)]
    cells = {each: [each.head, *(each.cell(look, drawn) for look in looks)] for each in columns}
    widths = {each: max(map(len, cells[each])) for each in columns}
    while sum(widths[each] for each in columns) + len(_GAP) * (len(columns) - 1) > width:
        least = max(columns, key=lambda each: each.goes)
        rest = width - sum(widths[each] + len(_GAP) for each in columns if each.goes)
        if rest >= (_NAME if least.goes > _NEEDED else _LEAST_NAME) or not least.goes:
            widths[COLUMNS[0]] = max(rest, 1)
            break
        columns.remove(least)
    cells[COLUMNS[0]] = [
        cells[COLUMNS[0]][0],
        *(_tail(name, widths[COLUMNS[0]], marks) for name in cells[COLUMNS[0]][1:]),
    ]
    lines = []
    for number in range(len(looks) + 1):
        texts = [
            cells[each][number].ljust(widths[each]) if each.left else cells[each][number].rjust(widths[each])
            for each in columns
        ]
        state = looks[number - 1].status.get("state") if number else ""
        style = _STYLES.get(str(state), "") if number else "bold"
        lines.append((_GAP.join(texts).rstrip(), style))
    return lines


def _foot(looks: Sequence[Look], count: int) -> Iterator[str]:
    """What stands below the table: what each disk has free, and what was left out."""
    if count > len(looks):
        yield f"{count - len(looks)} more do not fit into the window"
    disks = {look.disk.device: (look.disk.free, str(look.folder)) for look in looks if look.disk is not None}
    if len(disks) == 1:
        yield f"free on the disk: {format_bytes(next(iter(disks.values()))[0])}"
    elif disks:
        yield "free on disks: " + ", ".join(f"{format_bytes(free)} ({path})" for free, path in disks.values())
    for look in looks:
        if look.problem:
            yield look.problem


def _step(look: Look, style: Style) -> str:  # noqa: ARG001
    steps = look.status.get("steps")
    return f"{look.status.get('step', 0)}/{'?' if steps is None else steps}" if look.status else ""


def _loss(look: Look, style: Style) -> str:  # noqa: ARG001
    loss = _number(look.status, "loss")
    return "" if loss is None else f"{loss:.4f}"


def _rate(look: Look, style: Style) -> str:  # noqa: ARG001
    rate = _number(look.status, "tokens_per_s")
    return "" if rate is None or not _at_work(look) else format_count(rate)


def _left(look: Look, style: Style) -> str:  # noqa: ARG001
    left = _number(look.status, "seconds_left")
    return "" if left is None or not _at_work(look) else format_seconds(round(left))


def _ago(look: Look, style: Style) -> str:  # noqa: ARG001
    since = _number(look.status, "seconds_since_step")
    return "" if since is None or not _at_work(look) else format_seconds(round(since))


def _slow(look: Look, style: Style) -> str:  # noqa: ARG001
    """The stragglers: of one, which rank it is; of several, how many."""
    slow = look.status.get("stragglers")
    if not isinstance(slow, list) or not slow or not _at_work(look):
        return ""
    first = slow[0] if isinstance(slow[0], dict) else {}
    return f"rank {first.get('rank', '?')}" if len(slow) == 1 else counted(len(slow), "rank")


def _faults(look: Look, style: Style) -> str:  # noqa: ARG001
    faults = _number(look.status, "silent_faults")
    return f"{faults:.0f}" if faults else ""


def _at_work(look: Look) -> bool:
    return look.status.get("state") in {*ACTIVE, "stalled"}


def _number(status: Mapping[str, Any], name: str) -> float | None:
    """A figure of a status, which anybody may have written."""
    value = status.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


COLUMNS = (
    TableColumn("run", lambda look, _: escaped(str(look.folder)), left=True, goes=0),
    TableColumn("state", lambda look, _: str(look.status.get("state", "unreadable")), left=True, goes=1),
    TableColumn("step", _step, left=False, goes=2),
    TableColumn("loss", _loss, left=False, goes=3),
    TableColumn(
        "curve", lambda look, style: sparkline(look.losses, style.curve, style.marks), left=True, goes=7
    ),
    TableColumn("tokens/s", _rate, left=False, goes=8),
    TableColumn("left", _left, left=False, goes=4),
    TableColumn("last step", _ago, left=False, goes=9),
    TableColumn("slow", _slow, left=True, goes=6),
    TableColumn("faults", _faults, left=False, goes=5),
    TableColumn(
        "disk", lambda look, _: "" if look.disk is None else format_bytes(look.disk.used), left=False, goes=10
    ),
)


def _cut(text: str, width: int, marks: str) -> str:
    """The text in one line of the window."""
    dots = "…" if marks == BLOCKS else "~"
    return text if len(text) <= width else text[: max(0, width - 1)] + dots


def _tail(text: str, width: int, marks: str) -> str:
    """The end of a name, by which runs differ."""
    dots = "…" if marks == BLOCKS else "~"
    return text if len(text) <= width else dots + text[len(text) - width + 1 :]


class Ended:
    """Whether somebody asked for the end, which a handler of signals may say at any instruction.

    A `threading.Event` takes a lock to be set, and a handler that interrupts this very thread in `wait` would
    wait for itself; a SimpleQueue may be put to from within its own calls.
    """

    def __init__(self) -> None:
        self.asked = False
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ask(self) -> None:
        """Ask for it, from a handler as well."""
        self.asked = True
        self._woken.put(None)

    def wait(self, seconds: float) -> None:
        """Until it is asked for, at most so long."""
        with suppress(queue.Empty):
            self._woken.get(timeout=seconds)


@contextmanager
def ended_by_signals() -> Iterator[Ended]:
    """Ctrl-C and SIGTERM ask for the end, so that the screen is given back whole; a second one interrupts."""
    ended = Ended()

    def heed(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if ended.asked:
            raise KeyboardInterrupt
        ended.ask()

    before = {each: signal.signal(each, heed) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ended
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
