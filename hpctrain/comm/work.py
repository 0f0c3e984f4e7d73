"""Work: a started operation of a Group.

Started ones go on while this rank tests or waits for any of them, in whatever order, but not while it
computes or sits in a blocking call: what one rank waits for before a blocking call, the others must wait for
before it too. Messages alone, from one rank to another, go on in blocking calls, as those of MPI do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, Generic, TypeVar

from torch import Tensor
from typing_extensions import override

from hpctrain.comm.calls import Call
from hpctrain.comm.ledger import Ledger, LedgerEntry
from hpctrain.comm.timeline import TimelineSpan
from hpctrain.comm.transports.transport import TransportWork, wait_until

Result = TypeVar("Result", bound="Tensor | None")


class Work(Generic[Result]):
    """An operation of a Group: this one is complete."""

    __slots__ = ("_result",)

    def __init__(self, result: Result) -> None:
        self._result = result

    def wait(self) -> Result:
        """Complete the operation; its result."""
        return self._result

    def test(self) -> bool:
        """Let the operation make progress, without blocking; whether it is complete."""
        return True

    def proceed(self) -> None:
        """Go on to the next operation, where this is made of several, see SequentialWork."""


class SequentialWork(Work[Result]):
    """Operations of which each is started with what the one before gave: `steps` starts and yields them, and
    goes on when that one is complete; they make `result`.

    Groups want their operations started in one order on all ranks. So `proceed` and `wait` alone, which ranks
    call at the same points of the program, start the next one; `test` helps the one under way along.
    """

    __slots__ = ("_current", "_steps")

    def __init__(self, steps: Iterator[Work[Any]], result: Result) -> None:
        super().__init__(result)
        self._steps = steps
        self._current = next(steps, None)

    def proceed(self) -> None:
        """Complete the operation under way, and start the next one."""
        if self._current is not None:
            self._current.wait()
            self._current = next(self._steps, None)

    @override
    def wait(self) -> Result:
        while self._current is not None:
            self.proceed()
        return self._result

    @override
    def test(self) -> bool:
        if self._current is not None:
            self._current.test()
        return self._current is None


class CombinedWork(Work[Result]):
    """Operations that were all started, which make `result`."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Work[Any]], result: Result) -> None:
        super().__init__(result)
        self._works = works

    @override
    def wait(self) -> Result:
        for work in self._works:
            work.wait()
        return self._result

    @override
    def test(self) -> bool:
        complete = [work.test() for work in self._works]  # each of them goes on
        return all(complete)


class StartedWork(Work[Result]):
    """An operation that was started, which keeps its tensors alive until it is complete.

    `under_way` are all such operations of this rank.
    """

    __slots__ = ("_call", "_entry", "_ledger", "_pending", "_span", "_under_way")

    def __init__(
        self,
        result: Result,
        pending: TransportWork,
        call: Call,
        ledger: Ledger,
        entry: LedgerEntry,
        span: TimelineSpan | None,
        under_way: set[StartedWork[Any]],
    ) -> None:
        super().__init__(result)
        self._pending: TransportWork | None = pending
        self._call, self._ledger, self._entry = call, ledger, entry
        self._span, self._under_way = span, under_way
        under_way.add(self)

    @override
    def wait(self) -> Result:
        if self._pending is not None:
            began = perf_counter()
            calls = self._call.group.calls
            calls.waits, calls.current = began, self._call
            if len(self._under_way) == 1:
                self._pending.wait()
                self._done()
            else:  # others may wait for what this rank does next in its other operations
                wait_until(self._go_on_beside_others)
            self._call.group.leave()
            self._count(began)
        return self._result

    @override
    def test(self) -> bool:
        if self._pending is None:
            return True
        began = perf_counter()
        complete = self._go_on()
        self._count(began)
        return complete

    def _go_on(self) -> bool:
        if self._pending is not None and self._pending.test():
            self._done()
        return self._pending is None

    def _go_on_beside_others(self) -> bool:
        if self._go_on():
            return True
        for work in list(self._under_way):
            work._go_on()
        return self._pending is None

    def _done(self) -> None:
        self._pending = None
        self._call.release()
        self._under_way.discard(self)
        if self._span is not None:
            self._span.end = perf_counter()

    def _count(self, began: float) -> None:
        now = perf_counter()
        self._ledger.spend(self._entry, now - began)
        if self._span is not None:
            self._span.inside += now - began
            if self._pending is None:
                self._span.end = now
