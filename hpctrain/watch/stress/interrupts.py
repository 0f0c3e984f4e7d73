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
        came: True after the first signal.
    """

    def __init__(self) -> None:
        self.came = False
        self._since = 0.0
        self._former: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Interrupts:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._former[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former.clear()

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        if self.came and number == signal.SIGINT and monotonic() - self._since > MIN_SECONDS_BETWEEN:
            raise KeyboardInterrupt
        if not self.came:
            self.came, self._since = True, monotonic()
