"""Operations of several steps that take turns: each starts what it is made of in the program's order.

A group wants its operations started in one order on all ranks, but a started one of several steps goes on
when its rank looks after it, in an order of its own. So what comes behind such a one starts nothing before
that has started its last step. It need not be complete: others, in a blocking call, may do no more for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hpctrain.comm.transports.transport import SteppedWork, Steps, TransportWork, wait_until


class Turn:
    """The turn of one operation, of which `steps` start the rest; `started` from when they have."""

    def __init__(self, turns: Turns, steps: Callable[[Turn], Steps]) -> None:
        self._turns, self._steps = turns, steps
        self._chain: SteppedWork | None = None
        self.started = False

    def begin(self) -> SteppedWork:
        """Go on by what can be started now."""
        if self._chain is None:
            self._chain = SteppedWork(self._steps(self))
        if self._chain.test():
            self.started = True
        return self._chain

    def wait(self) -> None:
        """Wait until the operation is complete."""
        if not self.started:
            wait_until(self._comes)
        self.begin().wait()

    def _comes(self) -> bool:
        self._turns.go_on()
        return self.started

    def test(self) -> bool:
        """Let the operation make progress. Return True if it is complete."""
        self._turns.go_on()
        return self._chain is not None and self._chain.test()


class Turns:
    """Those of a group."""

    def __init__(self) -> None:
        self._waiting: deque[Turn] = deque()

    def start(self, steps: Callable[[Turn], Steps], blocking: bool) -> TransportWork | None:
        """Run an operation once all before have started theirs, or let it wait for that."""
        turn = Turn(self, steps)
        self._waiting.append(turn)
        self.go_on()
        if not blocking:
            return turn
        turn.wait()
        return None

    def go_on(self) -> None:
        """Let those start that can."""
        while self._waiting:
            self._waiting[0].begin()
            if not self._waiting[0].started:
                return
            self._waiting.popleft()
