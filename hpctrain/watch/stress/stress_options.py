"""Options of a stress test. The module imports nothing that a broken installation could lack."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.text import escaped
from hpctrain.units import parse_seconds

MOST_SECONDS = 30 * 86400.0


@dataclass(frozen=True)
class StressOptions:
    """Options of a stress test.

    Attributes:
        seconds: Time of the test.
        folder: Folder for the files of the disk test.
        rates: File of rates; None for the one in the user's cache.
    """

    seconds: float
    folder: Path = Path()
    rates: Path | None = None

    @classmethod
    def of(cls, seconds: str, folder: Path | None, rates: Path | None) -> StressOptions:
        """Return the options for the arguments of the command line.

        Raises:
            HpctrainError: `seconds` is not a time, or out of range.
        """
        try:
            number = parse_seconds(seconds)
        except HpctrainError as error:
            raise HpctrainError(f"--stress: {error.problems[0]}") from None
        if not 0 < number <= MOST_SECONDS:
            raise HpctrainError(f"--stress {seconds}: must be more than 0 seconds, and at most 30 days")
        return cls(number, folder or Path(), rates)


def check_folder(folder: Path) -> None:
    """Check that this rank can write files to a folder.

    Raises:
        HpctrainError: It cannot.
    """
    what = ""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
    elif not os.access(folder, os.W_OK | os.X_OK):
        what = "cannot be written to"
    if what:
        raise HpctrainError(f"--stress-dir {escaped(str(folder))}: {what} on {socket.gethostname()}")
