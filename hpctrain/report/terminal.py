"""Whether a person watches what this rank prints, how wide the window is, and what may be drawn in it.

A rank's own stdout does not tell. Open MPI gives every rank a pseudo-terminal even where the output of mpirun
goes to a file, MPICH gives it a pipe even on a terminal. So the launcher is looked for among the ancestors of
this process, and its stdout is asked instead.
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

# A launcher runs where its user is; an agent was started by one, maybe from another node.
LAUNCHERS = frozenset({"mpirun", "mpiexec", "orterun", "prterun", "prun", "srun"})
AGENTS = frozenset({"orted", "prted", "hydra_pmi_proxy", "hydra_bstrap_pr", "slurmstepd"})
DEFAULT_COLUMNS = 80
FILE_COLUMNS = 160
# Stands for a blank where no line is broken; no text that is told holds it.
_JOINT = "\0"
_BLIND = frozenset({"", "dumb", "unknown"})
_AT_ONCE = os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK  # how a terminal is opened


@dataclass(frozen=True, slots=True)
class Terminal:
    """The terminal on which the output of this rank ends up."""

    device: str
    """Path of it, such as `/dev/pts/3` or `/proc/1234/fd/1`."""
    takes_errors: bool
    """Whether stderr ends up there, too."""

    def columns(self) -> int:
        """Its width now, in characters, unless COLUMNS says otherwise; 80 where it does not know."""
        if wish := _wished_columns():
            return wish
        with suppress(OSError), descriptor_of(self.device, _AT_ONCE) as descriptor:
            return os.get_terminal_size(descriptor).columns or DEFAULT_COLUMNS
        return DEFAULT_COLUMNS


def columns() -> int | None:
    """What text on stdout keeps to: COLUMNS, or the terminal's; None for a file, which has no width."""
    terminal = find_terminal()
    return (_wished_columns() or None) if terminal is None else terminal.columns()


def coloured() -> bool:
    """Whether stdout is to have colours and bold letters: on a terminal that can, unless NO_COLOR is set."""
    return can_be_drawn_on() and _colours_wanted()


def stdout_console() -> Console:
    """For the tables of a verb: in a file without colours."""
    from rich.console import Console

    return Console(
        width=columns() or FILE_COLUMNS,
        force_terminal=coloured(),
        color_system="auto" if coloured() else None,
        highlight=False,
        soft_wrap=True,
    )


def live_console() -> Console:
    """For a table that is drawn again and again on the terminal of stdout."""
    from rich.console import Console

    return Console(
        force_terminal=True,
        color_system="auto" if _colours_wanted() else None,
        legacy_windows=False,
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def can_be_drawn_on() -> bool:
    """Whether stdout is a terminal that can draw over what it shows."""
    return find_terminal() is not None and os.environ.get("TERM", "") not in _BLIND


def stderr_console() -> Console:
    """For what goes to stderr while a verb works."""
    from rich.console import Console

    return Console(stderr=True, color_system="auto" if _colours_wanted() else None)


class _Nowhere(io.TextIOWrapper):
    """A screen with the letters of another one, on which nothing appears."""

    def __init__(self, other: TextIO | None) -> None:
        super().__init__(io.BytesIO(), encoding=getattr(other, "encoding", None) or "utf-8")

    def write(self, text: str) -> int:
        """Forget it."""
        return len(text)


def bar_console(output: TextIO | None) -> Console:
    """To draw a live bar for a terminal that was found; our stdout, which knows nothing of it, is not asked.

    What it draws is captured: rich itself flushes after each capture, and ends the process where the screen
    has gone away.
    """
    from rich.console import Console

    return Console(
        file=_Nowhere(output),
        force_terminal=True,
        color_system="auto" if _colours_wanted() else None,
        legacy_windows=False,
        highlight=False,
        markup=False,
    )


def fit(line: str, width: int | None) -> list[str]:
    """A line that is broken between words where it is longer than `width`; what follows is indented.

    A command in backticks stays whole, so that it can be copied.
    """
    if width is None or len(line) <= width:
        return [line]
    joined = re.sub(r"`[^`]*`", lambda command: command[0].replace(" ", _JOINT), line)
    broken = textwrap.wrap(
        joined, max(width, 20), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return [each.replace(_JOINT, " ") for each in broken]


def _colours_wanted() -> bool:
    # NO_COLOR asks for plain text; rich would leave bold letters.
    return not os.environ.get("NO_COLOR")


def _wished_columns() -> int:
    wish = os.environ.get("COLUMNS", "")
    return int(wish) if wish.isdecimal() and len(wish) < 6 else 0


def find_terminal(proc: Path = Path("/proc"), process: int | None = None) -> Terminal | None:
    """The terminal that shows the stdout of `process` (default: this one), None where no terminal does.

    `proc` is where the kernel's view of the processes is mounted; without one only this process is asked.
    """
    files = proc / str(process or os.getpid()) / "fd"
    if process is None and not files.is_dir():
        return _own_terminal()
    if stat.S_ISREG(_status(files / "1")[0]):  # redirected by a shell between the launcher and this process
        return None
    launcher = _find_launcher(proc, process or os.getpid())
    if launcher is not None:
        files = proc / str(launcher) / "fd"
    kind, device = _status(files / "1")
    # Opening a pipe here would make this process one of its readers.
    if stat.S_ISCHR(kind):
        with suppress(OSError), descriptor_of(files / "1", _AT_ONCE) as descriptor:
            if os.isatty(descriptor):
                return Terminal(str(files / "1"), takes_errors=device == _status(files / "2")[1] != 0)
    return None


def _find_launcher(proc: Path, process: int) -> int | None:
    """The nearest launcher among the ancestors, else the farthest agent of one, else None."""
    agent: int | None = None
    seen: set[int] = set()
    while process > 1 and process not in seen:
        seen.add(process)
        try:
            # `1234 (the name) S 1200 ...`: the name may itself hold blanks and parentheses.
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


def _own_terminal() -> Terminal | None:
    with suppress(OSError, ValueError):  # not a terminal, no descriptor at all
        device = os.ttyname(sys.stdout.fileno())
        errors = sys.stderr.isatty() and os.ttyname(sys.stderr.fileno()) == device
        return Terminal(device, takes_errors=errors)
    return None


def _status(path: Path) -> tuple[int, int]:
    """Mode and device of a file; zeros where there is none."""
    with suppress(OSError):
        return path.stat().st_mode, path.stat().st_rdev
    return 0, 0
