"""Queue and thread that pass metrics to a writer, for which the run does not wait."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from hpctrain.report.metric_rows import Row

MOST_ROWS = 10_000
"""Largest number of rows that wait for a writer."""

SECONDS_FOR_A_ROW = 120.0
"""Seconds that a writer may need for one row, or to start."""


@dataclass(frozen=True)
class FeedEntry:
    """Entry of the queue: a row of metrics, or the message that the run continues after an earlier step.

    Attributes:
        row: The row; None for the message.
        time: Time of the entry, in seconds since 1970.
        step: Step of the message.
    """

    row: Row | None
    time: float
    step: int = 0


class RowWriter(Protocol):
    """Destination of rows. One thread calls all methods but `abandon`. An exception ends the writer."""

    def write(self, row: Row, now: float) -> None:
        """Write the row of a step that ended at `now`, in seconds since 1970."""

    def roll_back(self, step: int) -> None:
        """Discard the rows of later steps, which the run computes again."""

    def close(self, completed: bool) -> None:
        """Close after the last row. `completed` is True if the run ended as planned, False if it failed."""

    def abandon(self) -> None:
        """Release everything that could keep this process from ending. Another thread may be in `write`."""


class Feed:
    """Passes rows to a writer that a thread makes and calls. No method waits except `close`.

    A writer is dropped with a warning if it raises an exception, lags `MOST_ROWS` rows behind, or needs more
    than `SECONDS_FOR_A_ROW` for a row.

    Attributes:
        name: Key of the deck, for warnings.
        is_dropped: True if the writer was dropped.
    """

    def __init__(
        self, name: str, make: Callable[[], RowWriter], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self._make, self._clock = name, make, clock
        self._queue: queue.Queue[FeedEntry | bool] = queue.Queue(MOST_ROWS)
        self._busy: float | None = clock()
        self._writer: RowWriter | None = None
        self._lock = threading.Lock()
        self.is_dropped = False
        self._thread = threading.Thread(target=self._work, name=f"feed-{name}", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        """Add the row of a step, which the caller does not change any more."""
        self._put(FeedEntry(row, time.time()))

    def roll_back(self, step: int) -> None:
        """Tell the writer that the run continues after an earlier step."""
        self._put(FeedEntry(None, time.time(), step))

    def end(self, completed: bool) -> None:
        """Let the writer close after it has written all rows. No other row may follow."""
        self._put(completed)

    def close(self, seconds: float) -> None:
        """Wait at most `seconds` until the writer has closed, else drop it."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._drop("did not finish before the run ended")

    def _put(self, entry: FeedEntry | bool) -> None:
        if self.is_dropped:
            return
        busy = self._busy
        if busy is not None and self._clock() - busy > SECONDS_FOR_A_ROW:
            self._drop(f"has not answered for {SECONDS_FOR_A_ROW:.0f} s")
            return
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self._drop(f"is {MOST_ROWS} rows behind")

    def _work(self) -> None:
        try:
            writer = self._writer = self._make()
            while not self.is_dropped:
                self._busy = None
                entry = self._queue.get()
                self._busy = self._clock()
                if isinstance(entry, bool):
                    writer.close(entry)
                    return
                if entry.row is None:
                    writer.roll_back(entry.step)
                else:
                    writer.write(entry.row, entry.time)
            writer.abandon()  # `_drop` ran before the writer existed and could not call this
        except BaseException as error:  # noqa: BLE001  (packages of others may raise anything, SystemExit too)
            self._drop(_reason(error))

    def _drop(self, reason: str) -> None:
        with self._lock:
            if self.is_dropped:
                return
            self.is_dropped = True
        sentence = "%s: no further steps are sent, it %s (metrics.jsonl is complete)"
        logging.getLogger("hpctrain").warning(sentence, self.name, reason)
        with suppress(queue.Full):
            self._queue.put_nowait(False)  # wakes the thread, where it waits
        if self._writer is not None:
            with suppress(Exception):
                self._writer.abandon()


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"fails: {error.strerror}{where}"
    words = " ".join(str(error).split())[:300]
    return f"fails: {type(error).__name__}" + (f": {words}" if words else "")
