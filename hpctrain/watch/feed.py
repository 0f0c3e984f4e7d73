"""A writer of metrics that a run does not wait for: its thread, its queue, and when it is given up."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from hpctrain.report.rows import Row

MOST_ROWS = 10_000  # that wait for a writer
SECONDS_FOR_A_ROW = 120.0  # that a writer may take for one, or to begin


@dataclass(frozen=True)
class Told:
    """What a writer is told: a row and its time; or, with no row, that the run goes on from `step`."""

    row: Row | None
    time: float
    step: int = 0


class RowWriter(Protocol):
    """Where rows go. All but `abandon` is called by one thread; whatever one raises ends it."""

    def write(self, row: Row, now: float) -> None:
        """Take the row of a step that ended at `now`, in seconds since 1970."""

    def go_back(self, step: int) -> None:
        """Rows of later steps than that count no more: the run makes them anew."""

    def close(self, whole: bool) -> None:
        """No other row comes; whether the run did all that it was to do."""

    def abandon(self) -> None:
        """Let go of whatever could keep this process from ending; another thread may be at work in it."""


class Feed:
    """Hands rows to a writer that a thread makes and calls; nothing here ever waits but `close`.

    A writer that raises, that lags `MOST_ROWS` rows behind, or that is at one for `SECONDS_FOR_A_ROW` is
    given up: a warning says so once.
    """

    def __init__(
        self, name: str, make: Callable[[], RowWriter], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self._make, self._clock = name, make, clock
        self._told: queue.Queue[Told | bool] = queue.Queue(MOST_ROWS)
        self._busy: float | None = clock()
        self._writer: RowWriter | None = None
        self._lock = threading.Lock()
        self.lost = False
        self._thread = threading.Thread(target=self._work, name=f"feed-{name}", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        """A step was made; the row is not to change any more."""
        self._put(Told(row, time.time()))

    def go_back(self, step: int) -> None:
        """The run goes on from the state after an earlier step."""
        self._put(Told(None, time.time(), step))

    def end(self, whole: bool) -> None:
        """No other row comes: the writer closes when it has written all there are."""
        self._put(whole)

    def close(self, seconds: float) -> None:
        """Wait so long for the writer to be closed, and not longer."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._drop("did not finish before the run ended")

    def _put(self, told: Told | bool) -> None:
        if self.lost:
            return
        busy = self._busy
        if busy is not None and self._clock() - busy > SECONDS_FOR_A_ROW:
            self._drop(f"has not answered for {SECONDS_FOR_A_ROW:.0f} s")
            return
        try:
            self._told.put_nowait(told)
        except queue.Full:
            self._drop(f"is {MOST_ROWS} rows behind")

    def _work(self) -> None:
        try:
            writer = self._writer = self._make()
            while not self.lost:
                self._busy = None
                told = self._told.get()
                self._busy = self._clock()
                if isinstance(told, bool):
                    writer.close(told)
                    return
                if told.row is None:
                    writer.go_back(told.step)
                else:
                    writer.write(told.row, told.time)
            writer.abandon()  # which nobody had where it was given up before it was made
        except BaseException as error:  # noqa: BLE001  (packages of others may raise anything, SystemExit too)
            self._drop(_reason(error))

    def _drop(self, reason: str) -> None:
        with self._lock:
            if self.lost:
                return
            self.lost = True
        sentence = "%s: no further steps are sent, it %s (metrics.jsonl is complete)"
        logging.getLogger("hpctrain").warning(sentence, self.name, reason)
        with suppress(queue.Full):
            self._told.put_nowait(False)  # wakes the thread, where it waits
        if self._writer is not None:
            with suppress(Exception):
                self._writer.abandon()


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"fails: {error.strerror}{where}"
    words = " ".join(str(error).split())[:300]
    return f"fails: {type(error).__name__}" + (f": {words}" if words else "")
