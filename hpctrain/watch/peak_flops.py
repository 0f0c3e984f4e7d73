"""What this machine computes per second: what counts as 100% MFU."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from pathlib import Path

import torch

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.files import parse_json, read_text
from hpctrain.host.device import gpu_name, on_host, synchronize
from hpctrain.host.device_memory import reset_peak
from hpctrain.host.processor import processor_name
from hpctrain.model.precision import Precision

PEAK_FILE = "peak.json"  # in a run's folder: measured rates by kind of machine
_HOST_SIZES, _GPU_SIZES = (256, 512), (4096, 8192)
_LARGE = 1024  # what several threads of a CPU need to reach their rate; one does with little memory
_SECONDS = 0.3
_ROUNDS = 2
_LONGEST_FILE = 100_000


class PeakFlops:
    """The FLOP/s of a rank that count as 100% MFU, the same on all ranks.

    Given by the deck; or measured, and kept in the run's folder for jobs that go on with the run on the same
    kind of nodes.
    """

    def __init__(self, world: World, deck: Deck, folder: Path) -> None:
        self._world, self._deck, self._path = world, deck, folder / PEAK_FILE
        self._given = deck.machine.peak_flops is not None
        self._again = True
        self.flops = deck.machine.peak_flops or 0.0
        self.exceeded = False
        """Whether a step on this rank ran at more than a peak that can be measured anew."""

    def find(self) -> None:
        """Take it from the run's folder, or else measure it. Collective."""
        if self._given:
            return
        kinds = self._kinds()
        with self._world.agreement():
            known = self._known().get(kinds, 0.0) if self._world.rank == 0 else 0.0
        self.flops = float(self._world.everyone.broadcast_object(known))
        if not self.flops:
            self._measure(kinds, 0.0)

    def share(self, flops: float) -> float:
        """The MFU (0 to 1) of FLOP/s of a rank. What is beyond a measured peak is the new one."""
        if flops > self.flops and not self._given:
            self.exceeded, self.flops = self._again, flops
        return flops / self.flops

    def measure_again(self) -> None:
        """Measure it anew, once in a run, after a step on rank 0 that exceeded it. Collective."""
        self.exceeded, self._again = False, False
        reached = float(self._world.everyone.broadcast_object(self.flops))
        self._measure(self._kinds(), reached)
        logging.getLogger("hpctrain").info(
            "a step exceeded the measured peak, which was measured again: %.1f GFLOP/s per rank are now "
            "100%% MFU",
            self.flops / 1e9,
        )

    def _measure(self, kinds: str, least: float) -> None:
        """Take the mean over all ranks, who measure together, but `least` if that is more; and keep it."""
        everyone = self._world.everyone
        everyone.barrier()
        rate = measure_gemm_flops(Precision.of(self._deck).product, self._world.device)
        total = everyone.all_reduce(torch.tensor(rate, dtype=torch.float64))
        self.flops = max(least, float(total.item()) / everyone.size)
        with self._world.agreement():
            if self._world.rank == 0:
                text = json.dumps(self._known() | {kinds: self.flops}, indent=1)
                self._path.write_text(text + "\n", encoding="utf-8")

    def _known(self) -> dict[str, float]:
        """FLOP/s by kinds, of the file; none where it is missing or is no such file."""
        with contextlib.suppress(OSError, ValueError):
            rows = parse_json(read_text(self._path, _LONGEST_FILE))
            rates = rows.items() if isinstance(rows, dict) else ()
            return {name: rate for name, rate in rates if isinstance(rate, float) and 0 < rate < 1e30}
        return {}

    def _kinds(self) -> str:
        """On what the rate depends, in words: device, how many share it, threads, precision."""
        world, run = self._world, self._deck.run
        here = gpu_name(world.device)
        if here is None:
            ranks = -(-world.size // world.nodes)
            here = f"{processor_name()}, cores {os.cpu_count()}, ranks {ranks}, threads {run.threads}"
        everywhere = sorted(set(world.everyone.all_gather_object(here)))
        return f"{'; '.join(everywhere)}; {self._deck.precision.compute}"


def measure_gemm_flops(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a square matrix product on this rank: the best of several sizes, in a third of a second.

    All ranks should measure at the same time, so that those which share cores or memory count that in.
    """
    sizes: tuple[int, ...] = _HOST_SIZES if on_host(device) else _GPU_SIZES
    if on_host(device) and torch.get_num_threads() > 1:
        sizes = (*sizes, _LARGE)
    # The operands of one size after the other lie in the same memory, as do the products.
    # GPUs run faster on constants, and what they take to be measured is no part of the run's peak.
    factors, products = torch.randn(2, max(sizes) ** 2, dtype=dtype, device=device)
    best, rounds, began = 0.0, 0, time.perf_counter()
    while rounds < _ROUNDS or time.perf_counter() - began < _SECONDS:
        rounds += 1
        for size in sizes:
            square, product = (memory[: size * size].view(size, size) for memory in (factors, products))
            synchronize(device)
            start = time.perf_counter()
            torch.mm(square, square, out=product)
            synchronize(device)
            best = max(best, 2.0 * size**3 / (time.perf_counter() - start))
    del factors, products, square, product
    reset_peak(device)
    return best
