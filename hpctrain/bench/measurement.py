"""Clocks, a default vocabulary and result files, which the benchmarks share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.host.device import on_host, synchronize

_VOCABULARY = 320


def with_vocabulary(deck: Deck) -> Deck:
    """Return the deck, with a small vocabulary if it has none.

    Benchmarks on random tokens do not open the token file that would give the vocabulary.
    """
    return deck.with_keys(model={"vocabulary": deck.model.vocabulary or _VOCABULARY})


def slowest(world: World, seconds: float) -> float:
    """Return the largest value of all ranks. Collective."""
    return float(world.everyone.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max"))


def seconds_of(world: World, run: Callable[[], object]) -> float:
    """Call a function on all ranks after a barrier, and return the seconds of the slowest one. Collective."""
    world.everyone.barrier()
    start = time.perf_counter()
    run()
    return slowest(world, time.perf_counter() - start)


def write_json(path: Path, figures: object) -> None:
    """Write the results of a benchmark as JSON."""
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def clock(device: torch.device) -> float:
    """Return a time in seconds, of which the difference of two is the duration of the work between them.

    On CPUs it is the processor time of this thread, so that other programs on the machine do not count. On
    GPUs it is the time at which all work of the device is complete.
    """
    if on_host(device):
        return time.thread_time()
    synchronize(device)
    return time.perf_counter()
