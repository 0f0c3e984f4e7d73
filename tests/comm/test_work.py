"""Started operations, and operations made of several."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.comm.work import CombinedWork, SequentialWork, Work
from hpctrain.comm.world import World


def sum_and_square(world: World, values: Tensor, log: list[str]) -> SequentialWork[Tensor]:
    """The square of the ranks' sum, summed over the ranks."""

    def steps() -> Iterator[Work[Any]]:
        log.append("sum")
        yield world.everyone.start_all_reduce(values)
        log.append("square")
        yield world.everyone.start_all_reduce(values.square_())
        log.append("end")

    return SequentialWork(steps(), values)


@pytest.mark.mpi
def test_operations_follow_each_other(world: World) -> None:
    log: list[str] = []
    work = sum_and_square(world, torch.full((5,), world.rank + 1.0), log)
    total = world.size * (world.size + 1) / 2
    assert log == ["sum"]
    for _ in range(1000):
        assert not work.test()
    assert log == ["sum"], "a test alone starts nothing: ranks test at other moments"
    work.proceed()
    assert log == ["sum", "square"]
    assert torch.equal(work.wait(), torch.full((5,), total**2 * world.size))
    assert log == ["sum", "square", "end"]
    assert work.test()
    work.proceed()
    assert torch.equal(work.wait(), torch.full((5,), total**2 * world.size))


@pytest.mark.mpi
def test_several_at_once(world: World) -> None:
    """The second begins before the first goes on, on all ranks; each is tested another number of times."""
    logs: tuple[list[str], list[str]] = ([], [])
    first = sum_and_square(world, torch.full((70_000,), world.rank + 1.0), logs[0])
    second = sum_and_square(world, torch.full((3,), 2.0 * (world.rank + 1)), logs[1])
    for _ in range(world.rank * 50):
        first.test()
        second.test()
    first.proceed()
    second.proceed()
    total = world.size * (world.size + 1) / 2
    assert torch.equal(second.wait(), torch.full((3,), (2 * total) ** 2 * world.size))
    assert torch.equal(first.wait(), torch.full((70_000,), total**2 * world.size))


@pytest.mark.mpi
def test_works_of_one_result(world: World) -> None:
    """Complete when all are, by waiting or by testing, which helps each of them along."""
    for waits in (True, False):
        parts = [torch.full((size,), 1.0) for size in (70_000, 3)]
        work = CombinedWork([world.everyone.start_all_reduce(part) for part in parts], parts[0])
        while not (waits or work.test()):
            pass
        assert work.wait() is parts[0] and work.test()
        assert all(bool((part == world.size).all()) for part in parts)


@pytest.mark.mpi(min_size=2)
def test_who_waits_for_one_of_several_lets_others_have_the_core(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    yields, asked = 0, os.sched_yield

    def counting() -> None:
        nonlocal yields
        yields += 1
        asked()

    monkeypatch.setattr("hpctrain.comm.transports.transport.os.sched_yield", counting)
    if world.rank:
        time.sleep(0.1)
    parts = [torch.full((size,), 1.0) for size in (70_000, 3)]
    works = [world.everyone.start_all_reduce(part) for part in parts]
    works[0].wait()
    seen = yields
    works[1].wait()
    assert seen or world.rank
    assert all(bool((part == world.size).all()) for part in parts)


def test_nothing_to_do() -> None:
    assert CombinedWork([], torch.ones(2)).test()
    work = SequentialWork(iter(()), torch.ones(2))
    assert work.test()
    assert torch.equal(work.wait(), torch.ones(2))
    complete = Work(torch.ones(1))
    complete.proceed()
    assert complete.test()
