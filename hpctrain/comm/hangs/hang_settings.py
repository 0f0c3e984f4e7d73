"""Settings of this process's watchdog: when a job counts as hanging, and where that is reported."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.units import UnitError, parse_seconds

HANG_SECONDS_VARIABLE = "HPCTRAIN_HANG_SECONDS"
"""Environment variable that sets the time limit until a deck has been read."""

DEFAULT_SECONDS = 600.0


class HangSettings:
    """Settings of the watchdog of this process. All methods are local, and any thread may call them.

    Attributes:
        seconds: Seconds without a sign of life of any rank after which the job ends; 0 turns this off.
        folder: Folder, visible to all ranks, into which each rank writes its report of a hang. None if the
            watchdog uses a folder of its own.
        on_hang: Function that the rank that ends the job calls with a one-sentence diagnosis; None for none.
        training: True during training steps. Then processor time is not a sign of life, and a job of one rank
            is watched, too.
        waits_outside: True while this rank waits for a person or another program. It never counts as hanging
            then.
        watched: True while a watchdog uses these settings.
        changed: Event that wakes the watchdog so that it uses new settings at once.
    """

    def __init__(self, seconds: float = DEFAULT_SECONDS) -> None:
        self.seconds = seconds
        self.folder: Path | None = None
        self.on_hang: Callable[[str], None] | None = None
        self.training = False
        self.waits_outside = False
        self.watched = False
        self.changed = threading.Event()

    def set_limit(self, seconds: float) -> None:
        """Set the time limit, which holds at once: the watchdog is woken. Local.

        Args:
            seconds: Seconds without a sign of life of any rank after which the job ends; 0 turns the watchdog
                off. All ranks must set the same.
        """
        self.seconds = seconds
        self.changed.set()

    def report_to(self, folder: Path, on_hang: Callable[[str], None]) -> None:
        """Set the folder for reports and the function that is called on a hang, for use at once.

        Before this is called, reports go into a folder of the watchdog, and no function is called. If a rank
        cannot write its report, it says so on stderr.

        Args:
            folder: Existing folder that all ranks see; all ranks set the same one.
            on_hang: Function that one rank, the one that ends the job, calls in the watchdog's thread with a
                diagnosis in one sentence. The job ends afterwards, also if the function raises an error or
                takes too long.
        """
        self.folder, self.on_hang = folder, on_hang
        self.changed.set()

    def disable_on_hang(self) -> None:
        """Forget the function of `report_to`. Reports still go into the same folder."""
        self.on_hang = None

    @contextmanager
    def training_steps(self) -> Iterator[None]:
        """Return a context manager that sets `training` in its block and clears it at the end.

        In the block only communication, phases and disk traffic are signs of life, and processor time is
        none. A job of one rank is watched, too.
        """
        self.training = True
        self.changed.set()
        try:
            yield
        finally:
            self.training = False

    @contextmanager
    def allow_silence(self) -> Iterator[None]:
        """Return a context manager in whose block this rank never counts as hanging.

        It is for waits for a person or another program. At the end of the block, also after an error, the
        time limit holds again.
        """
        self.waits_outside = True
        try:
            yield
        finally:
            self.waits_outside = False


def default_seconds(environment: Mapping[str, str]) -> float:
    """Return the time limit, in seconds, until a deck has been read, and for verbs without a deck. Local.

    It is the time in HPCTRAIN_HANG_SECONDS, such as "90" or "2 min"; without that variable or if it is empty,
    600. 0 turns the watchdog off.

    Args:
        environment: Environment variables.

    Raises:
        HpctrainError: The value of HPCTRAIN_HANG_SECONDS is not a time.
    """
    text = environment.get(HANG_SECONDS_VARIABLE, "").strip()
    if not text:
        return DEFAULT_SECONDS
    try:
        return parse_seconds(text)
    except UnitError as error:
        raise HpctrainError(f"{HANG_SECONDS_VARIABLE}: {error} (0 turns the watchdog off)") from None
