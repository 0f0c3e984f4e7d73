"""What the tests of a node have in common: where this rank is, how long a test may take, what it found."""

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
"""So many of a rank's results of one test and round that came out wrong are told; the rest are counted."""

Look = Callable[[str, Tensor], None]
"""What looks at a result of a test or operation before it is compared: where tests plant their faults."""


def as_it_is(_test: str, _result: Tensor) -> None:
    """Changes nothing: what a Look is where nothing is planted."""


@dataclass(frozen=True)
class StressRank:
    """This rank, the names of all ranks' nodes, and its device; `sharers` are the ranks of its node."""

    rank: int
    hosts: tuple[str, ...]
    device: torch.device
    local_rank: int = 0
    sharers: int = 1

    @property
    def name(self) -> str:
        """`rank 3 on n1`."""
        return self.of(self.rank)

    def of(self, rank: int) -> str:
        """The same of any rank."""
        return f"rank {rank} on {self.hosts[rank]}"


class TestTime:
    """The time of a test in a round: until `deadline`, in seconds of `perf_counter`, unless it is stopped."""

    def __init__(self, deadline: float, stopped: Callable[[], bool] = lambda: False) -> None:
        self.deadline, self.stopped = deadline, stopped

    @property
    def left(self) -> float:
        """Seconds; none once it is stopped."""
        return 0.0 if self.stopped() else max(0.0, self.deadline - perf_counter())

    @property
    def over(self) -> bool:
        """Whether there are none."""
        return self.left == 0.0

    def part(self, share: float) -> TestTime:
        """The first part of what is left."""
        return TestTime(perf_counter() + share * self.left, self.stopped)


@dataclass
class StressRecord:
    """What a rank found in a round: `rates` by name; results that are `wrong`, by test, and the `number` of
    all of these; `notes` on what was not tested, by test.
    """

    rates: dict[str, float] = field(default_factory=dict)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    number: int = 0
    notes: list[tuple[str, str]] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    """The nodes that the results of `wrong` lead to."""

    def add_wrong(self, test: str, sentence: str, host: str) -> None:
        """Enter a wrong result, which leads to a node."""
        self.number += 1
        if sum(known == test for known, _ in self.wrong) < MOST_WRONG:
            self.wrong.append((test, sentence))
            self.hosts.append(host)

    def row(self) -> dict[str, Any]:
        """All of it, for the other ranks."""
        return dict(vars(self))


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds of what is computed there: of a thread its own, to which others on its core add nothing."""
    if on_host(device):
        return thread_time

    def now() -> float:
        synchronize(device)
        return perf_counter()

    return now


@contextmanager
def one_thread() -> Iterator[None]:
    """Within, torch computes by the thread that asks for it, whose time `clock_of` tells."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
