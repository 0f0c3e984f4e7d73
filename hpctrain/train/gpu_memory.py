"""Memory of GPUs at the start of a run, measured and compared with the plan."""

from __future__ import annotations

import logging

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.costs.memory_account import MemoryAccount
from hpctrain.host.device import on_host
from hpctrain.host.device_memory import available_bytes_of_gpu
from hpctrain.units import format_bytes


def warn_of_missing_memory(world: World, mesh: Mesh, planned: MemoryAccount) -> None:
    """Log a warning on rank 0 if a GPU has less memory for tensors than the plan needs. Collective.

    Communicators are connected first. What CUDA, NCCL and other processes have is measured then; what tensors
    will have is planned. On CPUs nothing happens.

    Args:
        world: The world of the run.
        mesh: Mesh of this rank's model.
        planned: Planned memory of this rank.
    """
    if on_host(world.device):
        return
    mesh.connect()
    needed, available = planned.total - planned.runtime, available_bytes_of_gpu(world.device)
    ranks = world.everyone.all_gather_object((needed - available, needed, available, world.hostname))
    rank = max(range(len(ranks)), key=lambda rank: ranks[rank][0])
    missing, needed, available, hostname = ranks[rank]
    if missing > 0 and world.rank == 0:
        sentence = (
            "the GPU of rank %s on %s has %s for tensors beside CUDA, NCCL and other processes, but the plan "
            "needs %s, so training may run out of memory"
        )
        sizes = format_bytes(available), format_bytes(needed)
        logging.getLogger("hpctrain").warning(sentence, rank, hostname, *sizes)
