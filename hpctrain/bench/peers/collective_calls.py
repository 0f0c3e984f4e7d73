"""The same primitives as others do them, for benchmarks: plain mpi4py on numpy arrays, and torch's gloo.

Each function takes the operation's tensors and returns a call without arguments that does it once on
exactly this memory, or None where the peer has no such operation.
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

Once = Callable[[], object]

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


def group_call(group: Group, operation: str, whole: Tensor, part: Tensor) -> Once:
    """The operation by a Group. `whole` is the full tensor, `part` one rank's equal share of it."""
    root = group.rank == 0
    other = torch.zeros_like(whole) if operation == "all_to_all" else whole
    calls: dict[str, Once] = {
        "all_reduce": lambda: group.all_reduce(whole),
        "reduce_scatter": lambda: group.reduce_scatter(whole, part),
        "all_gather": lambda: group.all_gather(part, whole),
        "broadcast": lambda: group.broadcast(whole),
        "reduce": lambda: group.reduce(whole),
        "gather": lambda: group.gather(part, 0, whole if root else None),
        "scatter": lambda: group.scatter(whole if root else None, part),
        "all_to_all": lambda: group.all_to_all(whole, other),
        "send_recv": lambda: _there_and_back(
            group.rank, lambda peer: group.send(whole, peer), lambda peer: group.recv(whole, peer)
        ),
    }
    return calls[operation]


def plain_call(group: Group, operation: str, whole: Tensor, part: Tensor) -> Once:
    """The operation by plain mpi4py on the arrays of the same memory."""
    communicator, root = communicator_of(group.objects), group.rank == 0
    array, piece = whole.numpy(), part.numpy()
    other = torch.zeros_like(whole).numpy() if operation == "all_to_all" else array
    calls: dict[str, Once] = {
        "all_reduce": lambda: communicator.Allreduce(MPI.IN_PLACE, array),
        "reduce_scatter": lambda: communicator.Reduce_scatter_block(array, piece),
        "all_gather": lambda: communicator.Allgather(piece, array),
        "broadcast": lambda: communicator.Bcast(array),
        "reduce": lambda: communicator.Reduce(MPI.IN_PLACE if root else array, array if root else None),
        "gather": lambda: communicator.Gather(piece, array if root else None),
        "scatter": lambda: communicator.Scatter(array if root else None, piece),
        "all_to_all": lambda: communicator.Alltoall(array, other),
        "send_recv": lambda: _there_and_back(
            group.rank,
            lambda peer: communicator.Send(array, peer),
            lambda peer: communicator.Recv(array, peer),
        ),
    }
    return calls[operation]


def start_gloo(world: World) -> None:
    """Make torch's default process group; its store's address travels over MPI. Collective."""
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
    """Take the process group down."""
    torch.distributed.destroy_process_group()


def gloo_call(group: Group, operation: str, whole: Tensor, part: Tensor) -> Once | None:
    """The operation by gloo, once `start_gloo` was called."""
    gloo, root = torch.distributed, group.rank == 0
    pieces = list(whole.chunk(group.size))
    other = torch.zeros_like(whole) if operation == "all_to_all" else whole
    calls: dict[str, Once] = {
        "all_reduce": lambda: gloo.all_reduce(whole),
        "all_gather": lambda: gloo.all_gather_into_tensor(whole, part),
        "broadcast": lambda: gloo.broadcast(whole, 0),
        "reduce": lambda: gloo.reduce(whole, 0),
        "gather": lambda: gloo.gather(part, pieces if root else None),
        "scatter": lambda: gloo.scatter(part, pieces if root else None),
        "all_to_all": lambda: gloo.all_to_all_single(other, whole),
        "send_recv": lambda: _there_and_back(
            group.rank, lambda peer: gloo.send(whole, peer), lambda peer: gloo.recv(whole, peer)
        ),
    }
    return calls.get(operation)


def _there_and_back(rank: int, send: Callable[[int], object], receive: Callable[[int], object]) -> None:
    """Ranks 0 and 1 send to each other in turn; the others do nothing."""
    if rank == 0:
        send(1)
        receive(1)
    elif rank == 1:
        receive(0)
        send(0)
