"""What a Group runs on: the primitives over contiguous tensors and counts of elements.

A Transport moves flat memory: shapes, defaults and the ledger are the Group's part. Every tensor
handed to it is contiguous; counts and offsets are elements. Counts of None are equal on all ranks, as
the tensor's own size says. Each primitive takes `blocking`: True
returns None when the result is there (on a GPU: is ordered before all later work of the current
stream); False starts it and returns a Pending, which keeps the buffers alive.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Literal, Protocol

from torch import Tensor

Operation = Literal["sum", "max", "min"]
Span = tuple[int, int]  # where elements begin, and how many


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return when the operation is complete."""

    def test(self) -> bool:
        """Let the operation make progress; whether it is complete."""


class Stages:
    """An operation made of several: a generator that yields each one and goes on when it is complete.

    The first is under way on return of the constructor; `test` and `wait` go on to the next ones.
    """

    def __init__(self, stages: Generator[Pending | None, None, None]) -> None:
        self._stages = stages
        self._current: Pending | None = None
        self._complete = False
        self._advance()

    def _advance(self) -> None:
        for pending in self._stages:
            if pending is not None:
                self._current = pending
                return
        self._current = None
        self._complete = True

    def wait(self) -> None:
        """Run all the stages that are left."""
        while self._current is not None:
            self._current.wait()
            self._advance()

    def test(self) -> bool:
        """Go on by the stages that are complete; whether the last one is."""
        while self._current is not None and self._current.test():
            self._advance()
        return self._complete


def drive(stages: Generator[Pending | None, None, None], blocking: bool) -> Pending | None:
    """Run the stages to their end, or start them."""
    if not blocking:
        return Stages(stages)
    for pending in stages:
        if pending is not None:
            pending.wait()
    return None


def starts(counts: Sequence[int]) -> list[int]:
    """Where each rank's elements begin when `counts` of them lie one behind the other."""
    offsets, total = [], 0
    for count in counts:
        offsets.append(total)
        total += count
    return offsets


def spans_of(counts: Sequence[int] | None, tensor: Tensor, size: int) -> list[Span]:
    """Each rank's span of `tensor`."""
    if counts is None:
        share = tensor.numel() // size
        return [(rank * share, share) for rank in range(size)]
    return list(zip(starts(counts), counts, strict=True))


class Transport(ABC):
    """The movement and reduction primitives among `size` ranks, of which this is `rank`.

    Reductions of bool: sum and max are or, min is and. `limit` is the most elements of one message;
    larger ones are split.
    """

    rank: int
    size: int
    limit: int

    @abstractmethod
    def all_reduce(self, tensor: Tensor, operation: Operation, blocking: bool) -> Pending | None:
        """Reduce over the ranks, in place on all of them."""

    @abstractmethod
    def reduce(self, tensor: Tensor, root: int, operation: Operation, blocking: bool) -> Pending | None:
        """Reduce over the ranks, in place at `root`; the others' tensors stay as they are."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int, blocking: bool) -> Pending | None:
        """Copy root's tensor into all others."""

    @abstractmethod
    def all_gather(
        self, tensor: Tensor, output: Tensor, counts: Sequence[int] | None, blocking: bool
    ) -> Pending | None:
        """Concatenate `counts[r]` elements of each rank r in `output`.

        `tensor` may be this rank's own place in `output`.
        """

    @abstractmethod
    def reduce_scatter(
        self,
        tensor: Tensor,
        output: Tensor,
        counts: Sequence[int] | None,
        operation: Operation,
        blocking: bool,
    ) -> Pending | None:
        """Reduce over the ranks; `output` is this rank's `counts[rank]` elements of the result.

        `output` may be this rank's own place in `tensor`.
        """

    @abstractmethod
    def gather(
        self, tensor: Tensor, output: Tensor | None, counts: Sequence[int] | None, root: int, blocking: bool
    ) -> Pending | None:
        """Concatenate `counts[r]` elements of each rank r in root's `output`, None elsewhere.

        Root's `tensor` may be its own place in `output`.
        """

    @abstractmethod
    def scatter(
        self, tensor: Tensor | None, output: Tensor, counts: Sequence[int] | None, root: int, blocking: bool
    ) -> Pending | None:
        """Hand `counts[r]` elements of root's `tensor` (None elsewhere) to each rank r's `output`.

        Root's `output` may be its own place in `tensor`.
        """

    @abstractmethod
    def all_to_all(
        self,
        tensor: Tensor,
        output: Tensor,
        send_counts: Sequence[int] | None,
        receive_counts: Sequence[int] | None,
        blocking: bool,
    ) -> Pending | None:
        """Hand the r-th piece of `tensor` to rank r; the pieces for this one lie in `output` in rank order.

        Both counts are None where all pieces of all ranks are even.
        """

    @abstractmethod
    def send(self, tensor: Tensor, destination: int, tag: int, blocking: bool) -> Pending | None:
        """Send all of `tensor` to one rank."""

    @abstractmethod
    def recv(self, tensor: Tensor, source: int, tag: int, blocking: bool) -> Pending | None:
        """Receive into all of `tensor` from one rank."""

    @abstractmethod
    def barrier(self, blocking: bool) -> Pending | None:
        """Complete when every rank has come here."""
