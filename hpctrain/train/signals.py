"""Signals to a run: remembered when they come, and acted on between steps."""

from __future__ import annotations

import contextlib
import os
import signal
from time import monotonic
from types import FrameType

from hpctrain.host.launcher import launched_rank

HEEDED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What a run heeds; the last two only where its starter did not let it ignore them, as `nohup` and `&` do."""

SECONDS_APART = 0.5
"""Interrupts within this time are one: a launcher may hand on what the terminal sends to all as well."""

# Open MPI's mpirun, asked to end, lets its ranks continue before it terminates them a second later.
_WARNING = (signal.SIGCONT,)

_FIRST = b"\nhpctrain: stops with a checkpoint as soon as the step is done; Ctrl-C again ends it at once\n"


def heed_from_now() -> None:
    """Let none of the signals above end this process any more; the next Signals has those that come.

    Loading the libraries of a run takes seconds, in which a scheduler may well send its signal.
    """
    Signals().__enter__()


class Signals:
    """While it is entered, the signals above no longer end this process: `came` has those that came.

    A second interrupt is a KeyboardInterrupt. Python runs its handlers between two of its own instructions,
    so a signal that arrives in a call of MPI is remembered when that call returns. Only a main thread may
    enter. What came to an outer one is taken over.
    """

    def __init__(self) -> None:
        self.came: set[signal.Signals] = set()
        self._former: dict[signal.Signals, signal._HANDLER] = {}
        self._interrupted: float | None = None

    def __enter__(self) -> Signals:
        warned = _WARNING if "OMPI_COMM_WORLD_SIZE" in os.environ else ()
        for number in (*HEEDED, *warned):
            ignored = signal.getsignal(number) is signal.SIG_IGN
            if ignored and number in (signal.SIGINT, signal.SIGHUP):
                continue
            former = self._former[number] = signal.signal(number, self._remember)
            outer = getattr(former, "__self__", None)
            if isinstance(outer, Signals):
                self.came |= outer.came
                self._interrupted = outer._interrupted
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            # None: one that Python did not install, and so cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former.clear()

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.came.add(signal.Signals(number))
        if number != signal.SIGINT:
            return
        now = monotonic()
        if self._interrupted is None:
            self._interrupted = now
            if launched_rank(os.environ) == 0:
                # Not by `print`, which may be what the signal has interrupted.
                with contextlib.suppress(OSError):
                    os.write(2, _FIRST)
        elif now - self._interrupted > SECONDS_APART:
            raise KeyboardInterrupt
