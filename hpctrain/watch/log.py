"""Log of a run: `log.txt` of rank 0, and `log.<rank>.txt` of other ranks that have warnings."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from hpctrain.comm.error_messages import print_error
from hpctrain.errors import failing_as
from hpctrain.text import escaped

NAME = "hpctrain"


def open_log(run_dir: Path | str, rank: int) -> logging.Logger:
    """Let the logger `hpctrain`, and with it every `hpctrain.x`, write to a run folder.

    Rank 0 writes messages from INFO on to `log.txt`, and from WARNING on also to stderr in a short form.
    Other ranks write messages from WARNING on to `log.<rank>.txt`, which is created with the first of them.
    Files are appended to, so that a resumed run keeps its history. Handlers of an earlier call are closed.

    Args:
        run_dir: The run folder.
        rank: Number of this rank.

    Returns:
        The logger.

    Raises:
        InputOutputError: `log.txt` cannot be opened.
    """
    logger = logging.getLogger(NAME)
    close_log(logger)
    path = Path(run_dir) / ("log.txt" if rank == 0 else f"log.{rank}.txt")
    with failing_as(f"{path}: cannot be opened"):
        file = _LogFile(path, encoding="utf-8", delay=rank != 0)
    file.setFormatter(_Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
    logger.addHandler(file)
    if rank == 0:
        logger.addHandler(_Screen())
    return logger


def close_log(logger: logging.Logger) -> None:
    """Close the handlers of `open_log` and reset the logger to Python's defaults."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def show_warnings(logger: logging.Logger, show: Callable[[str], None] | None) -> None:
    """Pass the warnings for the terminal to a function instead of stderr.

    A live bar uses this to print warnings above itself.

    Args:
        logger: Logger of `open_log`.
        show: The function; None for stderr.
    """
    for handler in logger.handlers:
        if isinstance(handler, _Screen):
            handler.show = show


class _Formatter(logging.Formatter):
    """Formatter that escapes control characters, which error messages of other packages may contain."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text, which may have several lines."""
        return escaped(super().format(record), "\n\t")


class _LogFile(logging.FileHandler):
    """Handler for a log file. If it cannot be written, lines are missing, and one warning is printed."""

    has_warned = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, opening the file for the first one."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802  (a name of logging)
        """Print once to stderr why lines are missing."""
        if not self.has_warned:
            self.has_warned = True
            problem = sys.exc_info()[1]
            print_error(f"warning: {self.baseFilename}: cannot be written, so lines are missing: {problem}")

    def close(self) -> None:
        """Close the file. Lines that a full disk cannot store are lost."""
        with contextlib.suppress(OSError):
            super().close()


class _Screen(logging.Handler):
    """Handler that prints warnings to the terminal in the form `warning: the sentence`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(_Formatter())
        self.show: Callable[[str], None] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record in one line."""
        text = f"{record.levelname.lower()}: {self.format(record)}"
        if self.show is not None:
            self.show(text)
        else:
            print_error(text)
