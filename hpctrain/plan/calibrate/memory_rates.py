"""Rates of a rank's memory: its size, its bandwidth, and what a CPU's library keeps of matrix products."""

from __future__ import annotations

import os

import torch

from hpctrain.comm.world import World
from hpctrain.host.device import on_host
from hpctrain.host.device_memory import gpu_memory_bytes
from hpctrain.host.memory import memory_limits, resident_bytes
from hpctrain.plan.calibrate.clock import Clock

_BYTES = 128 << 20
_ROW_COUNTS = 32
_FEATURES = 64


def memory_of_rank(world: World) -> float:
    """Return the bytes of a rank's GPU, or of its share of its node's memory."""
    if not on_host(world.device):
        return float(gpu_memory_bytes(world.device) or 0)
    most = min((limit.bytes for limit in memory_limits(os.environ)), default=0)
    return most / world.topology.ranks_per_node


def measure_bandwidth(clock: Clock, most: int) -> float:
    """Return the bytes per second that copies of at most `most` bytes read and write. Collective."""
    device = clock.world.device
    source = torch.zeros(min(_BYTES, max(4096, most)) // 4, device=device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / clock.seconds("memory", lambda: target.copy_(source))


def measure_prepared_product(world: World, dtype: torch.dtype) -> float | None:
    """Return the bytes that the CPU's library keeps for a product of 16-bit matrices; None on GPUs. Local.

    For each number of rows, the library prepares the products of a forward and a backward pass. Operands and
    results lie in memory that exists before.
    """
    if not on_host(world.device):
        return None
    count = 2 * _ROW_COUNTS
    inputs, outputs = torch.zeros(count, _FEATURES, dtype=dtype), torch.zeros(count, _FEATURES, dtype=dtype)
    weight, gradient = (torch.zeros(_FEATURES, _FEATURES, dtype=dtype) for _ in range(2))

    def multiply(rows: int) -> None:
        torch.mm(inputs[:rows], weight.t(), out=outputs[:rows])
        torch.mm(outputs[:rows], weight, out=inputs[:rows])
        torch.mm(outputs[:rows].t(), inputs[:rows], out=gradient)

    multiply(count)
    before = resident_bytes()
    for number in range(_ROW_COUNTS):
        multiply(count - 1 - number)
    return max(0, resident_bytes() - before) / (3 * _ROW_COUNTS)
