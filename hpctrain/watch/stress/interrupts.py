"""Ctrl-C during a test: what was found so far is told."""

from __future__ import annotations

import signal
from time import monotonic
from types import FrameType

HEEDED = (signal.SIGINT, signal.SIGTERM)

SECONDS_APART = 0.5
"""Interrupts within this time are one: a launcher may hand on what the terminal sends to all as well."""


class Interrupts:
    """While it is entered, an interrupt or a wish to end is remembered in `came`; a second interrupt is a
    KeyboardInterrupt. What a starter lets this process ignore, it ignores.
    """

    def __init__(self) -> None:
        self.came = False
        self._since = 0.0
        self._former: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Interrupts:
        for number in HEEDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._former[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former.clear()

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        if self.came and number == signal.SIGINT and monotonic() - self._since > SECONDS_APART:
            raise KeyboardInterrupt
        if not self.came:
            self.came, self._since = True, monotonic()
