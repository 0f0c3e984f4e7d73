"""Terminal that shows the output of this rank: whether there is one, its width, and what can be drawn.

The stdout of a rank does not show this. Open MPI gives every rank a pseudo-terminal even if the output of
mpirun goes to a file, and MPICH gives it a pipe even on a terminal. So the stdout of the launcher is
examined, which is searched among the ancestors of this process.
"""

from __future__ import annotations

import io
import os
import re
import stat
import sys
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from hpctrain.files import descriptor_of

if TYPE_CHECKING:
    from rich.console import Console

# A launcher runs on the node where its user started it. Launchers start agents, also on other nodes.
LAUNCHERS = frozenset({"mpirun", "mpiexec", "orterun", "prterun", "prun", "srun"})
AGENTS = frozenset({"orted", "prted", "hydra_pmi_proxy", "hydra_bstrap_pr", "slurmstepd"})
DEFAULT_COLUMNS = 80
FILE_COLUMNS = 160
_UNBREAKABLE_BLANK = "\0"
"""Character that replaces a blank at which a line must not be broken. Texts do not contain it."""
_PLAIN_TERMINALS = frozenset({"", "dumb", "unknown"})
"""Values of TERM for terminals that cannot replace their text."""
_OPEN_FLAGS = os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK
"""Flags with which a terminal is opened, so that the call does not wait."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """Terminal that shows the output of this rank.

    Attributes:
        device: Path of the terminal, such as `/dev/pts/3` or `/proc/1234/fd/1`.
        takes_errors: True if it also shows stderr.
    """

    device: str
    takes_errors: bool

    def columns(self) -> int:
        """Return its current width in characters, or COLUMNS if that is set; 80 if it is unknown."""
        if value := _columns_variable():
            return value
        with suppress(OSError), descriptor_of(self.device, _OPEN_FLAGS) as descriptor:
            return os.get_terminal_size(descriptor).columns or DEFAULT_COLUMNS
        return DEFAULT_COLUMNS


def columns() -> int | None:
    """Return the width of text on stdout: COLUMNS, or that of the terminal; None for a file."""
    terminal = find_terminal()
    return (_columns_variable() or None) if terminal is None else terminal.columns()


def coloured() -> bool:
    """Return True if stdout may have colours: it is a terminal that has them, and NO_COLOR is not set."""
    return can_be_drawn_on() and _allows_colours()


def stdout_console() -> Console:
    """Return a console for tables on stdout, without colours in a file."""
    from rich.console import Console

    return Console(
        width=columns() or FILE_COLUMNS,
        force_terminal=coloured(),
        color_system="auto" if coloured() else None,
        highlight=False,
        soft_wrap=True,
    )


def live_console() -> Console:
    """Return a console for a table that is drawn repeatedly on the terminal of stdout."""
    from rich.console import Console

    return Console(
        force_terminal=True,
        color_system="auto" if _allows_colours() else None,
        legacy_windows=False,
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def can_be_drawn_on() -> bool:
    """Return True if stdout is a terminal that can replace its text."""
    return find_terminal() is not None and os.environ.get("TERM", "") not in _PLAIN_TERMINALS


def stderr_console() -> Console:
    """Return a console for output on stderr."""
    from rich.console import Console

    return Console(stderr=True, color_system="auto" if _allows_colours() else None)


class _DiscardingStream(io.TextIOWrapper):
    """Stream that discards its text, with the encoding of another one."""

    def __init__(self, other: TextIO | None) -> None:
        super().__init__(io.BytesIO(), encoding=getattr(other, "encoding", None) or "utf-8")

    def write(self, text: str) -> int:
        """Discard the text."""
        return len(text)


def bar_console(output: TextIO | None) -> Console:
    """Return a console for a live bar, whose output is captured, whatever this process's stdout is.

    rich would flush its stream after each capture, and end the process if the terminal has been closed. So
    the console has a stream that discards its text.
    """
    from rich.console import Console

    return Console(
        file=_DiscardingStream(output),
        force_terminal=True,
        color_system="auto" if _allows_colours() else None,
        legacy_windows=False,
        highlight=False,
        markup=False,
    )


def fit(line: str, width: int | None) -> list[str]:
    """Break a line between words if it is longer than `width`. Further lines are indented.

    A command in backticks is not broken, so that it can be copied.
    """
    if width is None or len(line) <= width:
        return [line]
    joined = re.sub(r"`[^`]*`", lambda command: command[0].replace(" ", _UNBREAKABLE_BLANK), line)
    broken = textwrap.wrap(
        joined, max(width, 20), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return [each.replace(_UNBREAKABLE_BLANK, " ") for each in broken]


def _allows_colours() -> bool:
    # With NO_COLOR, rich would still write bold letters.
    return not os.environ.get("NO_COLOR")


def _columns_variable() -> int:
    value = os.environ.get("COLUMNS", "")
    return int(value) if value.isdecimal() and len(value) < 6 else 0


def find_terminal(proc: Path = Path("/proc"), process: int | None = None) -> Terminal | None:
    """Return the terminal that shows the stdout of a process; None if there is none.

    Args:
        proc: Mount point of the kernel's process information. Without it, only this process is examined.
        process: The process; None for this one.
    """
    files = proc / str(process or os.getpid()) / "fd"
    if process is None and not files.is_dir():
        return _terminal_of_this_process()
    if stat.S_ISREG(_status(files / "1")[0]):  # redirected by a shell between the launcher and this process
        return None
    launcher = _find_launcher(proc, process or os.getpid())
    if launcher is not None:
        files = proc / str(launcher) / "fd"
    kind, device = _status(files / "1")
    # Opening a pipe here would make this process one of its readers.
    if stat.S_ISCHR(kind):
        with suppress(OSError), descriptor_of(files / "1", _OPEN_FLAGS) as descriptor:
            if os.isatty(descriptor):
                return Terminal(str(files / "1"), takes_errors=device == _status(files / "2")[1] != 0)
    return None


def _find_launcher(proc: Path, process: int) -> int | None:
    """Return the nearest launcher among the ancestors, else the farthest agent of one, else None."""
    agent: int | None = None
    visited: set[int] = set()
    while process > 1 and process not in visited:
        visited.add(process)
        try:
            # `1234 (the name) S 1200 ...`: the name may contain blanks and parentheses.
            head, _, tail = (proc / str(process) / "stat").read_text(errors="replace").rpartition(")")
            parent = int(tail.split()[1])
        except (OSError, ValueError, IndexError):
            break
        name = head.partition("(")[2]
        if name.partition(".")[0] in LAUNCHERS:  # `mpirun.openmpi`, `mpiexec.hydra`
            return process
        if name in AGENTS:
            agent = process
        process = parent
    return agent


def _terminal_of_this_process() -> Terminal | None:
    with suppress(OSError, ValueError):  # not a terminal, no descriptor at all
        device = os.ttyname(sys.stdout.fileno())
        errors = sys.stderr.isatty() and os.ttyname(sys.stderr.fileno()) == device
        return Terminal(device, takes_errors=errors)
    return None


def _status(path: Path) -> tuple[int, int]:
    """Return mode and device of a file; zeros if there is none."""
    with suppress(OSError):
        return path.stat().st_mode, path.stat().st_rdev
    return 0, 0
