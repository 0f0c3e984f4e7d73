"""Handling of Ctrl-C during a stress test, which then shows its results so far."""

from __future__ import annotations

import signal
from time import monotonic
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)

MIN_SECONDS_BETWEEN = 0.5
"""Interrupts within this time count as one, since a launcher may forward what the terminal sends, too."""


class Interrupts:
    """Context manager that records SIGINT and SIGTERM instead of ending the process.

    A second SIGINT raises KeyboardInterrupt. Signals that the parent process made this process ignore stay
    ignored.

    Attributes:
        received: True after the first signal.
    """

    def __init__(self) -> None:
        self.received = False
        self._receive_time = 0.0
        self._former_handlers: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Interrupts:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._former_handlers[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former_handlers.clear()

    def _record(self, number: int, _frame: FrameType | None) -> None:
        if (
            self.received
            and number == signal.SIGINT
            and monotonic() - self._receive_time > MIN_SECONDS_BETWEEN
        ):
            raise KeyboardInterrupt
        if not self.received:
            self.received, self._receive_time = True, monotonic()
