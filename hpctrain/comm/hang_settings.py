"""Settings by which the watchdog of this process decides that the job hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.units import UnitError, parse_seconds

VARIABLE = "HPCTRAIN_HANG_SECONDS"
DEFAULT_SECONDS = 600.0


def _ignore(_: str) -> None:
    """Do nothing with the sentence about a hang."""


class HangSettings:
    """Limits by which a job counts as hanging. Any thread may read and change them.

    Attributes:
        seconds: Time without a sign of life on any rank after which the job ends; 0 means never.
        folder: Folder that all ranks see, for the reports of the ranks. None means one of the watchdog's own.
        on_hang: Function that gets one sentence on the rank that ends the job.
        training: True during training steps. There, processor time is no sign of life, and a single rank
            is watched, too.
        waits_outside: True while this rank waits for a person or for another program, for any time.
        watched: True while a watchdog follows these settings.
        changed: Event that wakes the watchdog, so that it follows new settings at once.
    """

    def __init__(self, seconds: float = DEFAULT_SECONDS) -> None:
        self.seconds = seconds
        self.folder: Path | None = None
        self.on_hang: Callable[[str], None] = _ignore
        self.training = False
        self.waits_outside = False
        self.watched = False
        self.changed = threading.Event()

    def limit(self, seconds: float) -> None:
        """Set the time without a sign of life after which the job ends.

        Args:
            seconds: The same number on all ranks; 0 means never.
        """
        self.seconds = seconds
        self.changed.set()

    def report_to(self, folder: Path, on_hang: Callable[[str], None]) -> None:
        """Have reports written into a run's folder, and `on_hang` called; all ranks see the folder."""
        self.folder, self.on_hang = folder, on_hang
        self.changed.set()

    def report_to_nobody(self) -> None:
        """Call nobody any more when the job hangs; reports still go into the same folder."""
        self.on_hang = _ignore

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Watch training steps in the block: only communication and input and output are signs of life."""
        self.training = True
        self.changed.set()
        try:
            yield
        finally:
            self.training = False

    @contextmanager
    def waiting_outside(self) -> Iterator[None]:
        """Excuse this rank in the block, which waits for a person or another program."""
        self.waits_outside = True
        try:
            yield
        finally:
            self.waits_outside = False


def default_seconds(environment: Mapping[str, str]) -> float:
    """Return the time limit that holds until a deck has been read, and for verbs without a deck.

    Raises:
        HpctrainError: If the environment variable is set to something other than a time.
    """
    text = environment.get(VARIABLE, "").strip()
    if not text:
        return DEFAULT_SECONDS
    try:
        return parse_seconds(text)
    except UnitError as error:
        raise HpctrainError(f"{VARIABLE}: {error} (0 turns the watchdog off)") from None
