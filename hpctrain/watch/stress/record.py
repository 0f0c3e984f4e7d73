"""Types that all tests share: this rank, the time of a test, and the record of its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor

from hpctrain.host.device import on_host, synchronize

MOST_WRONG = 3
"""Largest number of wrong results of a rank, test and round with a message. All are counted."""

ResultHook = Callable[[str, Tensor], None]
"""Function that is called with the name of a test or operation and its result before it is compared.

Tests of hpctrain use it to change results.
"""


def ignore_result(_test: str, _result: Tensor) -> None:
    """Do nothing with a result: the default ResultHook."""


@dataclass(frozen=True)
class StressRank:
    """Number, node and device of this rank.

    Attributes:
        rank: Number of the rank.
        hosts: Name of each rank's node.
        device: Device of this rank.
        local_rank: Number of this rank on its node.
        sharers: Number of ranks that share its memory.
    """

    rank: int
    hosts: tuple[str, ...]
    device: torch.device
    local_rank: int = 0
    sharers: int = 1

    @property
    def name(self) -> str:
        """Name of this rank for messages, such as `rank 3 on n1`."""
        return self.of(self.rank)

    def of(self, rank: int) -> str:
        """Return the name of any rank for messages."""
        return f"rank {rank} on {self.hosts[rank]}"


class TestTime:
    """Time that a test has in a round.

    Args:
        deadline: End of the time, in seconds of `perf_counter`.
        stopped: Function that returns True after an interrupt.
    """

    def __init__(self, deadline: float, stopped: Callable[[], bool] = lambda: False) -> None:
        self.deadline, self.stopped = deadline, stopped

    @property
    def left(self) -> float:
        """Remaining seconds; 0 after an interrupt."""
        return 0.0 if self.stopped() else max(0.0, self.deadline - perf_counter())

    @property
    def over(self) -> bool:
        """True if no time remains."""
        return self.left == 0.0

    def part(self, share: float) -> TestTime:
        """Return the first part of the remaining time, as a share of it."""
        return TestTime(perf_counter() + share * self.left, self.stopped)


@dataclass
class StressRecord:
    """Results of a rank in a round.

    Attributes:
        rates: Rates by name of the measure.
        wrong: Test and message of wrong results.
        number: Number of all wrong results.
        notes: Test and message about what was not tested.
        hosts: For each entry of `wrong`, the nodes that may have caused it, with commas; "" if unknown.
    """

    rates: dict[str, float] = field(default_factory=dict)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    number: int = 0
    notes: list[tuple[str, str]] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)

    def add_wrong(self, test: str, sentence: str, host: str) -> None:
        """Add a wrong result.

        Args:
            test: Name of the test.
            sentence: Message.
            host: Nodes that may have caused it, with commas; "" if unknown.
        """
        self.number += 1
        if sum(known == test for known, _ in self.wrong) < MOST_WRONG:
            self.wrong.append((test, sentence))
            self.hosts.append(host)

    def row(self) -> dict[str, Any]:
        """Return the record as a dict, to send it to other ranks."""
        return dict(vars(self))


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock for computations: CPU time of this thread, or time after synchronization of a GPU."""
    if on_host(device):
        return thread_time

    def now() -> float:
        synchronize(device)
        return perf_counter()

    return now


@contextmanager
def one_thread() -> Iterator[None]:
    """Return a context manager in which torch computes in the calling thread, which `clock_of` times."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
