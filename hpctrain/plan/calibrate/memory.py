"""Memory of a rank: how much there is, and how fast it is passed over."""

from __future__ import annotations

import os

import torch

from hpctrain.comm.world import World
from hpctrain.host.device import on_host
from hpctrain.host.device_memory import gpu_memory_bytes
from hpctrain.host.memory import memory_limits
from hpctrain.plan.calibrate.clock import Clock

_BYTES = 128 << 20


def memory_of_rank(world: World) -> float:
    """Bytes: of its GPU, or its share of what its node has and leaves to this job."""
    if not on_host(world.device):
        return float(gpu_memory_bytes(world.device) or 0)
    most = min((limit.bytes for limit in memory_limits(os.environ)), default=0)
    return most / world.topology.ranks_per_node


def measure_bandwidth(clock: Clock, most: int) -> float:
    """Bytes a second that are read and written, of copies of `most` bytes or fewer. Collective."""
    device = clock.world.device
    source = torch.zeros(min(_BYTES, max(4096, most)) // 4, device=device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / clock.seconds("memory", lambda: target.copy_(source))
