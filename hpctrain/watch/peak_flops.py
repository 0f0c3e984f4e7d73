"""FLOP/s of a rank that count as 100% MFU, given by the deck or measured."""

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

PEAK_FILE = "peak.json"
"""File in a run folder with measured FLOP/s by kind of machine."""

_HOST_SIZES, _GPU_SIZES = (256, 512), (4096, 8192)
_LARGE = 1024
"""Size with which several threads of a CPU reach their rate. One thread reaches it with less memory."""

_SECONDS = 0.3
_ROUNDS = 2
_LONGEST_FILE = 100_000


class PeakFlops:
    """FLOP/s of a rank that count as 100% MFU, the same on all ranks.

    The deck gives them, or they are measured and stored in the run folder for jobs that resume the run on the
    same kind of nodes.

    Attributes:
        flops: The FLOP/s; 0 before `find`.
        exceeded: True if a step on this rank was faster than a measured peak that can be measured again.
    """

    def __init__(self, world: World, deck: Deck, folder: Path) -> None:
        self._world, self._deck, self._path = world, deck, folder / PEAK_FILE
        self._is_in_deck = deck.machine.peak_flops is not None
        self._can_measure_again = True
        self.flops = deck.machine.peak_flops or 0.0
        self.exceeded = False

    def find(self) -> None:
        """Read the peak from the run folder, or else measure it. Collective."""
        if self._is_in_deck:
            return
        kinds = self._kinds()
        with self._world.agreement():
            peak = self._stored_peaks().get(kinds, 0.0) if self._world.rank == 0 else 0.0
        self.flops = float(self._world.everyone.broadcast_object(peak))
        if not self.flops:
            self._measure(kinds, 0.0)

    def share(self, flops: float) -> float:
        """Return the MFU (0 to 1) of FLOP/s of a rank. FLOP/s above a measured peak become the new peak."""
        if flops > self.flops and not self._is_in_deck:
            self.exceeded, self.flops = self._can_measure_again, flops
        return flops / self.flops

    def measure_again(self) -> None:
        """Measure the peak again, once in a run, after a step on rank 0 exceeded it. Collective."""
        self.exceeded, self._can_measure_again = False, False
        reached = float(self._world.everyone.broadcast_object(self.flops))
        self._measure(self._kinds(), reached)
        logging.getLogger("hpctrain").info(
            "a step exceeded the measured peak, which was measured again: %.1f GFLOP/s per rank are now "
            "100%% MFU",
            self.flops / 1e9,
        )

    def _measure(self, kinds: str, least: float) -> None:
        """Set and store the peak: the mean of all ranks' measurements, but at least `least`. Collective."""
        everyone = self._world.everyone
        everyone.barrier()
        rate = measure_gemm_flops(Precision.of(self._deck).product, self._world.device)
        total = everyone.all_reduce(torch.tensor(rate, dtype=torch.float64))
        self.flops = max(least, float(total.item()) / everyone.size)
        with self._world.agreement():
            if self._world.rank == 0:
                text = json.dumps(self._stored_peaks() | {kinds: self.flops}, indent=1)
                self._path.write_text(text + "\n", encoding="utf-8")

    def _stored_peaks(self) -> dict[str, float]:
        """Return the stored FLOP/s by kind of machine; {} if the file is missing or damaged."""
        with contextlib.suppress(OSError, ValueError):
            rows = parse_json(read_text(self._path, _LONGEST_FILE))
            rates = rows.items() if isinstance(rows, dict) else ()
            return {name: rate for name, rate in rates if isinstance(rate, float) and 0 < rate < 1e30}
        return {}

    def _kinds(self) -> str:
        """Return what the rate depends on: devices, ranks that share them, threads, precision. Collective."""
        world, run = self._world, self._deck.run
        here = gpu_name(world.device)
        if here is None:
            ranks = -(-world.size // world.nodes)
            here = f"{processor_name()}, cores {os.cpu_count()}, ranks {ranks}, threads {run.threads}"
        everywhere = sorted(set(world.everyone.all_gather_object(here)))
        return f"{'; '.join(everywhere)}; {self._deck.precision.compute}"


def measure_gemm_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP/s of square matrix products on this rank: the best of several sizes, in 0.3 s.

    All ranks should measure at the same time, since ranks may share cores and memory.

    Args:
        dtype: dtype of the operands.
        device: Device of this rank.
    """
    sizes: tuple[int, ...] = _HOST_SIZES if on_host(device) else _GPU_SIZES
    if on_host(device) and torch.get_num_threads() > 1:
        sizes = (*sizes, _LARGE)
    # All sizes use the same memory. GPUs run faster on constants, so operands are random.
    factors, products = torch.randn(2, max(sizes) ** 2, dtype=dtype, device=device)
    best, rounds, begin = 0.0, 0, time.perf_counter()
    while rounds < _ROUNDS or time.perf_counter() - begin < _SECONDS:
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
