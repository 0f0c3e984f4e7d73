"""Signals to a run, which are recorded when they arrive and handled between steps."""

from __future__ import annotations

import contextlib
import os
import signal
from time import monotonic
from types import FrameType

from hpctrain.host.launcher import launched_rank

HANDLED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that a run handles; the last two only if they are not ignored already, as by `nohup` and `&`."""

SECONDS_BETWEEN_INTERRUPTS = 0.5
"""Interrupts within this time count as one, since both the terminal and the launcher may send it."""

# When Open MPI's mpirun must end, it sends SIGCONT to its ranks a second before it terminates them.
_WARNING = (signal.SIGCONT,)

_FIRST = b"\nhpctrain: stops with a checkpoint as soon as the step is done; Ctrl-C again ends it at once\n"


def record_signals() -> None:
    """Record signals from now on instead of ending the process. The next Signals takes them over.

    Importing the libraries of a run takes seconds, during which a scheduler may already send a signal.
    """
    Signals().__enter__()


class Signals:
    """Context in which signals are recorded in `received` instead of ending the process.

    A second interrupt raises KeyboardInterrupt. Python runs signal handlers between its own instructions, so
    a signal during an MPI call is recorded when that call returns. Only the main thread may enter.
    Nested contexts take over what the outer one has recorded.
    """

    def __init__(self) -> None:
        self.received: set[signal.Signals] = set()
        self._earlier_handlers: dict[signal.Signals, signal._HANDLER] = {}
        self._interrupted: float | None = None

    def __enter__(self) -> Signals:
        warning = _WARNING if "OMPI_COMM_WORLD_SIZE" in os.environ else ()
        for number in (*HANDLED, *warning):
            ignored = signal.getsignal(number) is signal.SIG_IGN
            if ignored and number in (signal.SIGINT, signal.SIGHUP):
                continue
            earlier = self._earlier_handlers[number] = signal.signal(number, self._record)
            outer = getattr(earlier, "__self__", None)
            if isinstance(outer, Signals):
                self.received |= outer.received
                self._interrupted = outer._interrupted
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier_handlers.items():
            # None: a handler that was not installed by Python, which cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._earlier_handlers.clear()

    def _record(self, number: int, _frame: FrameType | None) -> None:
        self.received.add(signal.Signals(number))
        if number != signal.SIGINT:
            return
        now = monotonic()
        if self._interrupted is None:
            self._interrupted = now
            if launched_rank(os.environ) == 0:
                # The signal may have interrupted `print`.
                with contextlib.suppress(OSError):
                    os.write(2, _FIRST)
        elif now - self._interrupted > SECONDS_BETWEEN_INTERRUPTS:
            raise KeyboardInterrupt
