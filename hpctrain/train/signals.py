"""Signals to a run: remembered when they come, and acted on between steps."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

HEEDED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


def heed_from_now() -> None:
    """Let none of the signals above end this process any more; the next Signals has those that come.

    Loading the libraries of a run takes seconds, in which a scheduler may well send its signal.
    """
    Signals().__enter__()


class Signals:
    """While it is entered, the signals above no longer end this process: `came` has those that came.

    Python runs its handlers between two of its own instructions, so one that arrives in a call of MPI is
    remembered when that call returns. Only a main thread may enter. What came to an outer one is taken over.
    """

    def __init__(self) -> None:
        self.came: set[signal.Signals] = set()
        self._former: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Signals:
        for number in HEEDED:
            former = self._former[number] = signal.signal(number, self._remember)
            outer = getattr(former, "__self__", None)
            if isinstance(outer, Signals):
                self.came |= outer.came
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            # None: one that Python did not install, and so cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former.clear()

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.came.add(signal.Signals(number))
