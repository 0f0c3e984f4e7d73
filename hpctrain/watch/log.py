"""The log of a run: `log.txt` of rank 0, `log.<rank>.txt` of a rank that has something to complain about."""

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
    """The logger `hpctrain`, and through it every `hpctrain.x`, made to write into the run directory.

    Rank 0 writes INFO and worse to `log.txt`, and WARNING and worse to stderr as well, in a short form. Any
    other rank writes WARNING and worse to `log.<rank>.txt`, a file that exists only once there is something
    in it. Files are appended to, so that a resumed run keeps its history. Opening again closes what was open.
    InputOutputError where `log.txt` cannot be opened.
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
    """Close what `open_log` opened and leave the logger as Python made it."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def show_warnings(logger: logging.Logger, show: Callable[[str], None] | None) -> None:
    """Hand the warnings for the screen to `show` instead of stderr; None gives them back to stderr.

    A live bar asks for this, so that a warning stands above the bar and does not tear it.
    """
    for handler in logger.handlers:
        if isinstance(handler, _Screen):
            handler.show = show


class _Formatter(logging.Formatter):
    """Without control characters, such as packages of others may have in what they say of their errors."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text; it may have several lines."""
        return escaped(super().format(record), "\n\t")


class _LogFile(logging.FileHandler):
    """The file of a log; a disk that refuses costs lines of the log and one complaint, never the run."""

    complained = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, opening the file for the first one."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802  named by logging
        """Say once on stderr why lines are missing."""
        if not self.complained:
            self.complained = True
            problem = sys.exc_info()[1]
            print_error(f"warning: {self.baseFilename}: cannot be written, so lines are missing: {problem}")

    def close(self) -> None:
        """Close the file; what a full disk still refuses is lost."""
        with contextlib.suppress(OSError):
            super().close()


class _Screen(logging.Handler):
    """Warnings for the person who watches: `warning: the sentence`."""

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
