"""Clocks, a default vocabulary, and the output of results, which the benchmarks share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.host.device import on_host, synchronize
from hpctrain.report.terminal import stdout_console

_VOCABULARY = 320
_POLL_SECONDS = 0.02


def with_vocabulary(deck: Deck) -> Deck:
    """Return the deck, with a small vocabulary if it has none.

    Benchmarks on random tokens do not open the token file that would give the vocabulary.
    """
    return deck.with_keys(model={"vocabulary": deck.model.vocabulary or _VOCABULARY})


def slowest(world: World, seconds: float) -> float:
    """Return the largest value of all ranks. Collective."""
    return float(world.everyone.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max"))


def seconds_of(world: World, run: Callable[[], object], repeats: int = 1) -> float:
    """Call a function on all ranks, and return the mean seconds of a call on the slowest one. Collective."""
    world.everyone.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return slowest(world, time.perf_counter() - start) / repeats


def time_by_turns(
    world: World, operations: dict[str, Callable[[], object]], rounds: int, repeats: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of operations on the slowest rank, by name and round. Collective.

    Every second round has the opposite order. A first round, which fills caches, does not count.

    Args:
        world: All ranks.
        operations: Functions by name.
        rounds: Number of rounds.
        repeats: Number of calls of each function in a round, over which the seconds are averaged.
    """
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    for number in range(rounds + 1):
        for name in operations if number % 2 else reversed(operations):
            duration = seconds_of(world, operations[name], repeats)
            if number:
                seconds[name].append(duration)
    return seconds


def wait_asleep(world: World) -> None:
    """Wait until all ranks call this, without the busy core of a barrier. Collective."""
    work = world.everyone.start_all_reduce(torch.zeros(1))
    while not work.test():
        time.sleep(_POLL_SECONDS)
    work.wait()


def publish(world: World, lines: Sequence[str], results: object, output: Path | None) -> None:
    """Print the results of a benchmark on rank 0, and write them as JSON. Collective.

    Args:
        world: All ranks.
        lines: Lines to print.
        results: Results for the file.
        output: The file; None for no file.
    """
    with world.agreement():
        if world.rank == 0:
            stdout_console().print("\n".join(lines), markup=False)
            if output is not None:
                output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def clock(device: torch.device) -> float:
    """Return a time in seconds, of which the difference of two is the duration of the work between them.

    On CPUs it is the processor time of this thread, so that other programs on the machine do not count. On
    GPUs it is the time at which all work of the device is complete.
    """
    if on_host(device):
        return time.thread_time()
    synchronize(device)
    return time.perf_counter()
