"""Order in which operations of several steps start their parts.

All ranks of a group must start the calls of its transport in the same order. An audited operation consists of
several such calls, its parts, and starts the next one when its rank tests it or waits for it. Ranks do this
at different times, so the parts of two operations in flight could start in different orders. Therefore, an
operation starts its first part only after all earlier operations have started their last part. These need not
be complete, since they may need a later blocking call of another rank for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hpctrain.comm.transports.transport import SteppedWork, Steps, TransportWork, wait_until


class OrderedOperation:
    """Operation that starts its parts after all earlier operations have started theirs.

    Attributes:
        started: True once the operation has started its last part. The generator of its steps sets this.
    """

    def __init__(self, order: StartOrder, steps: Callable[[OrderedOperation], Steps]) -> None:
        self._order, self._steps = order, steps
        self._chain: SteppedWork | None = None
        self.started = False

    def begin(self) -> SteppedWork:
        """Start all parts that can be started now, without waiting, and return the chain of steps.

        Collective, as the parts. Only StartOrder calls it, when all earlier operations have started their
        last part. The first call starts at least the first part. Later calls return the same chain.
        """
        if self._chain is None:
            self._chain = SteppedWork(self._steps(self))
        if self._chain.test():
            self.started = True
        return self._chain

    def wait(self) -> None:
        """Wait until the operation is complete, and start parts of other operations of the group meanwhile.

        A part is one of the transport calls that the operation consists of. If the operation is complete,
        this returns at once. Otherwise it can only become complete when the other ranks have started all its
        parts, too. They do so while they start, test or wait for any operation of the group, each rank at its
        own time.

        This starts parts of earlier operations first. It starts those of later ones only after the last part
        of this one. If a part that is started here fails, its error is raised here, whichever operation it
        belongs to.
        """
        if not self.started:
            wait_until(self._advance)
        self.begin().wait()

    def _advance(self) -> bool:
        self._order.advance()
        return self.started

    def test(self) -> bool:
        """Start the parts of all operations that may start, and let this one make progress. Does not wait.

        Returns:
            True if this operation is complete.
        """
        self._order.advance()
        return self._chain is not None and self._chain.test()


class StartOrder:
    """Operations of one group that have not started all their parts, in the order of the program.

    Its methods are local, but the operations are collective.
    """

    def __init__(self) -> None:
        self._waiting: deque[OrderedOperation] = deque()

    def start(self, steps: Callable[[OrderedOperation], Steps], blocking: bool) -> TransportWork | None:
        """Queue an operation, and start its parts when all earlier ones have started theirs.

        Collective, as the operation. Errors of earlier operations whose parts are started meanwhile are
        raised here.

        Args:
            steps: Function that takes the OrderedOperation and returns its steps. They set its attribute
                `started` to True when they have started their last part; until then, or until the operation
                is complete, no later operation starts.
            blocking: True to return only after the operation is complete.

        Returns:
            The handle of the operation; None if `blocking`.
        """
        operation = OrderedOperation(self, steps)
        self._waiting.append(operation)
        self.advance()
        if not blocking:
            return operation
        operation.wait()
        return None

    def advance(self) -> None:
        """Start the parts of all operations that may start them now, in order, without waiting."""
        while self._waiting:
            self._waiting[0].begin()
            if not self._waiting[0].started:
                return
            self._waiting.popleft()
