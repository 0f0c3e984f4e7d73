"""The ranks' clocks against each other."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from hpctrain.comm.group import Group

_EXCHANGES = 20


def clock_offset(group: Group, node: int, clock: Callable[[], float] = perf_counter) -> float:
    """How much this rank's clock is ahead of the clock of the group's rank 0, in seconds. Collective.

    The ranks of one node (`node` is this rank's) read the same clock, so theirs is exactly that of the
    lowest of them, which exchanges messages with rank 0: of several round trips the shortest counts, in
    whose middle rank 0 is taken to have answered (Cristian 1989). The error is at most half of it.
    """
    nodes = group.all_gather_object(node)
    leader = nodes.index(node)
    mine = 0.0
    for rank in sorted({nodes.index(other) for other in nodes} - {0}):
        if group.rank == 0:
            _answer(group, rank, clock)
        elif group.rank == rank:
            mine = _ask(group, clock)
    return float(group.all_gather_object(mine)[leader])


def _ask(group: Group, clock: Callable[[], float]) -> float:
    shortest, offset = float("inf"), 0.0
    time = torch.zeros(1, dtype=torch.float64)
    for _ in range(_EXCHANGES):
        asked = clock()
        group.send(time, 0)
        group.recv(time, 0)
        answered = clock()
        if answered - asked < shortest:
            shortest, offset = answered - asked, (asked + answered) / 2 - time.item()
    return offset


def _answer(group: Group, rank: int, clock: Callable[[], float]) -> None:
    time = torch.zeros(1, dtype=torch.float64)
    for _ in range(_EXCHANGES):
        group.recv(time, rank)
        time[0] = clock()
        group.send(time, rank)
