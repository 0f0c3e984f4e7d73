"""What a Group runs on: something that runs a described call over contiguous tensors.

A Transport moves flat memory: shapes, defaults and the ledger are the Group's part. Counts and offsets are
elements. A blocking call returns None when the result is there (on a GPU: is ordered before all later work
of the current stream); another one is started and returns a TransportWork, which keeps the memory alive.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from hpctrain.comm.calls import Call

ElementRange = tuple[int, int]  # where elements begin, and how many
Steps = Iterator["TransportWork | None"]


class TransportWork(Protocol):
    """Operation that has been started and may not be complete yet."""

    def wait(self) -> None:
        """Wait until the operation is complete."""

    def test(self) -> bool:
        """Let the operation make progress. Return True if it is complete."""


class SteppedWork:
    """An operation made of several: an iterator that yields each one and goes on when it is complete.

    The first is under way on return of the constructor; `test` and `wait` go on to the next ones.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._current: TransportWork | None = None
        self._complete = False
        self._advance()

    def _advance(self) -> None:
        for pending in self._steps:
            if pending is not None:
                self._current = pending
                return
        self._current = None
        self._complete = True

    def wait(self) -> None:
        """Run all the steps that are left."""
        while self._current is not None:
            self._current.wait()
            self._advance()

    def test(self) -> bool:
        """Go on by the steps that are complete; whether the last one is."""
        while self._current is not None and self._current.test():
            self._advance()
        return self._complete


class ConditionWork:
    """A TransportWork that is complete when a condition holds, which other operations bring about."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        self.test = condition

    def wait(self) -> None:
        """Wait until the operation is complete."""
        wait_until(self.test)


class ParallelWork:
    """Operations that go on at once: the steps of one may wait for those of another."""

    def __init__(self, parts: Sequence[TransportWork]) -> None:
        self._parts = parts

    def test(self) -> bool:
        """Let each go on; whether all are complete."""
        complete = [part.test() for part in self._parts]
        return all(complete)

    def wait(self) -> None:
        """See TransportWork. What goes on over links for long leaves the cores to ranks that add."""
        wait_until(self.test, 0, 10, 200e-6)


def wait_until(
    test: Callable[[], bool], spins: int = 100, yields: int = 10_000, pause: float = 50e-6
) -> None:
    """Return when something is complete: looked at all the time, after so many looks in between others that
    want the core, after so many more now and then, with so many seconds in between.
    """
    looks = 0
    while not test():
        looks += 1
        if looks > yields:
            time.sleep(pause)
        elif looks > spins:
            os.sched_yield()


def run_steps(steps: Steps, blocking: bool) -> TransportWork | None:
    """Run the steps to their end, or start them."""
    if not blocking:
        return SteppedWork(steps)
    for pending in steps:
        if pending is not None:
            pending.wait()
    return None


def offsets_of(counts: Sequence[int]) -> list[int]:
    """Where each rank's elements begin when `counts` of them lie one behind the other."""
    return list(accumulate(counts, initial=0))[:-1]


def ranges_of_ranks(counts: Sequence[int] | None, tensor: Tensor, size: int) -> list[ElementRange]:
    """Each rank's span of `tensor`."""
    if counts is None:
        share = tensor.numel() // size
        return [(rank * share, share) for rank in range(size)]
    return list(zip(offsets_of(counts), counts, strict=True))


def pairwise_ranges(call: Call, size: int) -> tuple[Tensor, list[ElementRange], Tensor, list[ElementRange]]:
    """What moves pieces, as messages of each pair of ranks: what this rank gives and each rank's span of it,
    what it receives into and each rank's span of that.
    """
    source, target = call.memory, call.tensor if call.output is None else call.output
    assert source is not None and target is not None

    def own(tensor: Tensor) -> list[ElementRange]:
        return [(0, tensor.numel() if call.root in (peer, -1) else 0) for peer in range(size)]

    def pieces(tensor: Tensor | None, counts: Sequence[int] | None) -> list[ElementRange]:
        return [(0, 0)] * size if tensor is None else ranges_of_ranks(counts, tensor, size)

    sends = own(source) if call.operation in {"all_gather", "gather"} else pieces(call.tensor, call.counts)
    scattered = call.operation == "scatter"
    receives = own(target) if scattered else pieces(call.output, call.received or call.counts)
    return source, sends, target, receives


class Transport(ABC):
    """Runs calls among `size` ranks, of which this is `rank`."""

    rank: int
    size: int
    sharers = 1
    """How many of the ranks, this one among them, `common_zeros` gives one and the same memory."""
    in_rank_order = True
    """Whether its sums have the bits of adding in rank order."""

    @abstractmethod
    def run(self, call: Call) -> TransportWork | None:
        """Do what `call` describes (see Group for each operation), or start it if it is not blocking.

        Where `tensor` or `output` has the pieces of all ranks, the other may be this rank's own place in it.
        Reductions of bool: sum and max are or, min is and.
        """

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialized memory that this transport likes best."""
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def common_zeros(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:  # noqa: ARG002
        """So many zeros that are one memory for `sharers` ranks; None where there is none. Collective.

        What ranks write there others may read after an `all_gather` into all of it, of which each has its
        own piece there, or a barrier; and may be written over only after another one. Neither copies.
        """
        return None

    def crosses_once(self, call: Call) -> bool:  # noqa: ARG002
        """Whether of what a call moves the ranks of a node bring each byte but once to another node."""
        return False

    def adds_once(self, call: Call) -> bool:  # noqa: ARG002
        """Whether one rank adds each piece of an all_reduce, the r-th that of `reduction.split`, for all."""
        return False

    def scratch_bytes(self, elements: int, itemsize: int, scattered: bool = False) -> int:  # noqa: ARG002
        """Host memory of its own that a started sum of so many elements takes, and keeps; `scattered` where
        it leaves each rank its piece of them.
        """
        return 0
