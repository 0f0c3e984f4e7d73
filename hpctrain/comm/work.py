"""Handles of operations that a Group has started.

A started operation takes its next step only while its rank tests it or waits for any started operation. It
takes none while the rank computes or is in a blocking call. So if one rank waits for an operation before a
blocking call, all other ranks of the operation must do so, too. Messages that MPI already has may arrive at
any time.
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
    """Handle of an operation of a Group. This base class is the handle of an operation that is complete.

    Complete means that the result may be used, on a GPU by later work of the current stream, and that the
    tensors that were passed may be changed. On other ranks the operation may be incomplete. `test` is local.
    `wait` may return only after the other ranks of the operation have started it, too.

    Args:
        result: What `wait` returns.
    """

    __slots__ = ("_result",)

    def __init__(self, result: Result) -> None:
        self._result = result

    def wait(self) -> Result:
        """Wait until the operation is complete, and return its result; at once if it is already complete."""
        return self._result

    def test(self) -> bool:
        """Let the operation make progress, without waiting. Return True if it is complete. Local."""
        return True

    def proceed(self) -> None:
        """Wait for the current operation of a SequentialWork, and start its next one, if any.

        Other classes do nothing. All ranks of the operations call it at the same point of the program.
        """


class SequentialWork(Work[Result]):
    """Operations of which each needs the result of the one before.

    All ranks of a group must start operations in the same order. So only `proceed` and `wait` start the next
    operation; all ranks must call them at the same points of the program. `test` lets the current operation
    make progress, and starts nothing, so ranks may call it at any time.

    Args:
        steps: Iterator that starts the operations and yields their handles. The first one is started at once.
        result: What `wait` returns; the operations write into it.
    """

    __slots__ = ("_current", "_steps")

    def __init__(self, steps: Iterator[Work[Any]], result: Result) -> None:
        super().__init__(result)
        self._steps = steps
        self._current = next(steps, None)

    @override
    def proceed(self) -> None:
        """Wait for the current operation, and start the next one, if any. Nothing happens after the last one.

        All ranks of the operations call it at the same point of the program.
        """
        if self._current is not None:
            self._current.wait()
            self._current = next(self._steps, None)

    @override
    def wait(self) -> Result:
        """Run the remaining operations one after another, and return the result.

        All ranks of the operations call it at the same point of the program, since it starts operations.
        """
        while self._current is not None:
            self.proceed()
        return self._result

    @override
    def test(self) -> bool:
        """Let the current operation make progress, without waiting and without starting the next one. Local.

        Returns:
            True if the last operation is complete and `proceed` or `wait` has been called after it. So it
            does not become True by testing alone.
        """
        if self._current is not None:
            self._current.test()
        return self._current is None


class CombinedWork(Work[Result]):
    """Operations of groups or of a GPU that were all started, and that write into one result."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Work[Any] | TransportWork], result: Result) -> None:
        super().__init__(result)
        self._works = works

    @override
    def wait(self) -> Result:
        for work in self._works:
            work.wait()
        return self._result

    @override
    def test(self) -> bool:
        complete = [work.test() for work in self._works]  # test all: each must make progress
        return all(complete)


class StartedWork(Work[Result]):
    """Handle of an operation that a transport has started.

    It keeps the tensors alive until the operation is complete, and enters its time in the ledger.

    Args:
        result: What `wait` returns.
        transport_work: The transport's handle.
        call: The call; it has entered its group's log.
        ledger: Ledger of this rank.
        entry: Entry of the call in it.
        span: Entry of the call in the timeline, or None.
        in_flight: Set of all started operations of this rank, which contains this one until it is complete.
    """

    __slots__ = ("_call", "_entry", "_in_flight", "_ledger", "_span", "_transport_work")

    def __init__(
        self,
        result: Result,
        transport_work: TransportWork,
        call: Call,
        ledger: Ledger,
        entry: LedgerEntry,
        span: TimelineSpan | None,
        in_flight: set[StartedWork[Any]],
    ) -> None:
        super().__init__(result)
        self._transport_work: TransportWork | None = transport_work
        self._call, self._ledger, self._entry = call, ledger, entry
        self._span, self._in_flight = span, in_flight
        in_flight.add(self)

    @override
    def wait(self) -> Result:
        """Wait until the operation is complete, and return its result; at once if it is already complete.

        Meanwhile all started operations of this rank make progress. The time counts in the ledger and the
        timeline.
        """
        if self._transport_work is not None:
            start = perf_counter()
            calls = self._call.group.calls
            calls.waiting_since, calls.current = start, self._call
            if len(self._in_flight) == 1:
                self._transport_work.wait()
                self._complete()
            else:  # other ranks may wait for this rank's other operations
                wait_until(self._progress_all)
            self._call.group.leave()
            self._add_seconds(start)
        return self._result

    @override
    def test(self) -> bool:
        if self._transport_work is None:
            return True
        start = perf_counter()
        complete = self._progress()
        self._add_seconds(start)
        return complete

    def _progress(self) -> bool:
        """Let this operation make progress. Return True if it is complete."""
        if self._transport_work is not None and self._transport_work.test():
            self._complete()
        return self._transport_work is None

    def _progress_all(self) -> bool:
        """Let all started operations make progress. Return True if this one is complete."""
        if self._progress():
            return True
        for work in list(self._in_flight):
            work._progress()
        return self._transport_work is None

    def _complete(self) -> None:
        self._transport_work = None
        self._call.release()
        self._in_flight.discard(self)
        if self._span is not None:
            self._span.end = perf_counter()

    def _add_seconds(self, start: float) -> None:
        """Enter the time since `start` in the ledger and the timeline."""
        now = perf_counter()
        self._ledger.add_seconds(self._entry, now - start)
        if self._span is not None:
            self._span.call_seconds += now - start
            if self._transport_work is None:
                self._span.end = now
