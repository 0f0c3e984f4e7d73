"""Collective operations by hpctrain, by mpi4py on numpy arrays, and by gloo of torch, on the same memory.

In this module, `full` is the complete tensor of an operation, and `part` is the equal share of one rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.host.mpi_library import MPI, communicator_of

CollectiveCall = Callable[[], object]
"""Function that performs a collective operation once."""

OPERATIONS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "send_recv",
)


def start_gloo(world: World) -> None:
    """Create the default process group of torch, whose store has its address sent by MPI. Collective."""
    port = 0
    if world.rank == 0:
        store = TCPStore("127.0.0.1", 0, world.size, True, wait_for_workers=False)
        port = store.port
    host, port = world.everyone.broadcast_object((world.hostname, port))
    if world.rank != 0:
        store = TCPStore(host, port, world.size, False)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    torch.distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)


def stop_gloo() -> None:
    """Destroy the default process group of torch."""
    torch.distributed.destroy_process_group()


def calls_by_program(
    group: Group, operation: str, full: Tensor, part: Tensor, gloo: bool
) -> dict[str, CollectiveCall]:
    """Return an operation by each program that has it; `gloo` requires `start_gloo`."""
    calls = {
        "hpctrain": _group_call(group, operation, full, part),
        "mpi4py": _plain_call(group, operation, full, part),
    }
    by_gloo = _gloo_call(group, operation, full, part) if gloo else None
    return calls if by_gloo is None else calls | {"gloo": by_gloo}


def _group_call(group: Group, operation: str, full: Tensor, part: Tensor) -> CollectiveCall:
    """Return an operation by a Group of hpctrain."""
    root = group.rank == 0
    other = torch.zeros_like(full) if operation == "all_to_all" else full
    calls: dict[str, CollectiveCall] = {
        "all_reduce": lambda: group.all_reduce(full),
        "reduce_scatter": lambda: group.reduce_scatter(full, part),
        "all_gather": lambda: group.all_gather(part, full),
        "broadcast": lambda: group.broadcast(full),
        "reduce": lambda: group.reduce(full),
        "gather": lambda: group.gather(part, 0, full if root else None),
        "scatter": lambda: group.scatter(full if root else None, part),
        "all_to_all": lambda: group.all_to_all(full, other),
        "send_recv": lambda: _ping_pong(
            group.rank, lambda peer: group.send(full, peer), lambda peer: group.recv(full, peer)
        ),
    }
    return calls[operation]


def _plain_call(group: Group, operation: str, full: Tensor, part: Tensor) -> CollectiveCall:
    """Return an operation by mpi4py on numpy arrays of the same memory."""
    communicator, root = communicator_of(group.objects), group.rank == 0
    array, piece = full.numpy(), part.numpy()
    other = torch.zeros_like(full).numpy() if operation == "all_to_all" else array
    calls: dict[str, CollectiveCall] = {
        "all_reduce": lambda: communicator.Allreduce(MPI.IN_PLACE, array),
        "reduce_scatter": lambda: communicator.Reduce_scatter_block(array, piece),
        "all_gather": lambda: communicator.Allgather(piece, array),
        "broadcast": lambda: communicator.Bcast(array),
        "reduce": lambda: communicator.Reduce(MPI.IN_PLACE if root else array, array if root else None),
        "gather": lambda: communicator.Gather(piece, array if root else None),
        "scatter": lambda: communicator.Scatter(array if root else None, piece),
        "all_to_all": lambda: communicator.Alltoall(array, other),
        "send_recv": lambda: _ping_pong(
            group.rank,
            lambda peer: communicator.Send(array, peer),
            lambda peer: communicator.Recv(array, peer),
        ),
    }
    return calls[operation]


def _gloo_call(group: Group, operation: str, full: Tensor, part: Tensor) -> CollectiveCall | None:
    """Return an operation by gloo after `start_gloo`; None if gloo does not have it."""
    gloo, root = torch.distributed, group.rank == 0
    pieces = list(full.chunk(group.size))
    other = torch.zeros_like(full) if operation == "all_to_all" else full
    calls: dict[str, CollectiveCall] = {
        "all_reduce": lambda: gloo.all_reduce(full),
        "all_gather": lambda: gloo.all_gather_into_tensor(full, part),
        "broadcast": lambda: gloo.broadcast(full, 0),
        "reduce": lambda: gloo.reduce(full, 0),
        "gather": lambda: gloo.gather(part, pieces if root else None),
        "scatter": lambda: gloo.scatter(part, pieces if root else None),
        "all_to_all": lambda: gloo.all_to_all_single(other, full),
        "send_recv": lambda: _ping_pong(
            group.rank, lambda peer: gloo.send(full, peer), lambda peer: gloo.recv(full, peer)
        ),
    }
    return calls.get(operation)


def _ping_pong(rank: int, send: Callable[[int], object], receive: Callable[[int], object]) -> None:
    """Send a message from rank 0 to rank 1 and back; other ranks do nothing."""
    if rank == 0:
        send(1)
        receive(1)
    elif rank == 1:
        receive(0)
        send(0)
