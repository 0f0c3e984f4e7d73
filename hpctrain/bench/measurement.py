"""What the benchmarks share: the time of the slowest rank, and files of figures."""

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
    """The deck, with a small vocabulary where it leaves that to its token file, which is never opened."""
    return deck.with_keys(model={"vocabulary": deck.model.vocabulary or _VOCABULARY})


def slowest(world: World, seconds: float) -> float:
    """The most that any rank took; collective."""
    return float(world.everyone.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max"))


def seconds_of(world: World, run: Callable[[], object]) -> float:
    """Seconds of the slowest rank, all beginning together; collective."""
    world.everyone.barrier()
    began = time.perf_counter()
    run()
    return slowest(world, time.perf_counter() - began)


def write_json(path: Path, figures: object) -> None:
    """Figures for programs."""
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
