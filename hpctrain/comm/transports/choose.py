"""What tensors travel over, by the names that a deck gives, and which of it serves the ranks of a world."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hpctrain.comm.topology import ranks_per_node_of
from hpctrain.comm.transports.hierarchical import HierarchicalTransport
from hpctrain.comm.transports.mpi import MpiTransport
from hpctrain.comm.transports.node_memory import NodeMemory
from hpctrain.comm.transports.reduction import ReductionScratch
from hpctrain.comm.transports.shared import SharedTransport
from hpctrain.comm.transports.staged import StagedTransport
from hpctrain.comm.transports.transport import Transport
from hpctrain.host.mpi_library import MPI

GpuNames = Sequence[str | None]
"""Of every rank the name of its GPU, which no other GPU has; None on a CPU."""

TransportPair = tuple[Transport, Transport]


class TransportSetting(NamedTuple):
    """What a transport runs between: a communicator, the `nodes` of its ranks, memory to receive into, and
    what this rank sees of its node's, if anything.
    """

    communicator: MPI.Intracomm
    nodes: Sequence[int]
    scratch: ReductionScratch
    memory: NodeMemory | None


class TransportChoice(NamedTuple):
    """What carries tensors in host memory and those of a GPU: `pair` makes both, collectively.

    `suits` says whether "auto" takes it for these ranks, of several carriers the first; `obstacles` why this
    rank cannot use it, as ends of sentences; `on_host` whether a call takes the host's time until it is done.
    """

    pair: Callable[[TransportSetting], TransportPair]
    suits: Callable[[GpuNames], bool]
    obstacles: Callable[[GpuNames], list[str]]
    on_host: bool


def _mpi(ends: TransportSetting) -> TransportPair:
    host = MpiTransport(ends.communicator, ends.scratch)
    return host, StagedTransport(host)


def _shared(ends: TransportSetting) -> TransportPair:
    """Through memory, where these ranks are several of a node, or as many of each of several nodes."""
    mpi = MpiTransport(ends.communicator, ends.scratch)
    host: Transport = mpi
    together = ranks_per_node_of(ends.nodes)
    if ends.memory is not None and together > 1:
        one = together == mpi.size
        host = SharedTransport(mpi, ends.memory) if one else HierarchicalTransport(mpi, ends.memory, together)
    return host, StagedTransport(host)


def _nccl(ends: TransportSetting) -> TransportPair:
    from hpctrain.comm.transports.nccl import NcclTransport

    host = MpiTransport(ends.communicator, ends.scratch)
    return host, NcclTransport(ends.communicator, ends.scratch)


def _own_gpus(gpus: GpuNames) -> bool:
    """Whether every rank has a GPU of its own, and there are several."""
    return None not in gpus and len(set(gpus)) == len(gpus) > 1


def _several_on_cpus(gpus: GpuNames) -> bool:
    return set(gpus) == {None} and len(gpus) > 1


def _shared_obstacles(gpus: GpuNames) -> list[str]:
    if set(gpus) == {None}:
        return []
    return ['tensors of a GPU are not in the memory of a node; use "nccl", "mpi" or "auto"']


def _nccl_obstacles(gpus: GpuNames) -> list[str]:
    obstacles = []
    if None in gpus:
        obstacles.append('not every rank has a GPU; use "mpi" or "auto"')
    elif len(set(gpus)) < len(gpus) and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        obstacles.append(
            'several ranks share a GPU; start one rank a GPU, use "mpi", '
            "or set NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or newer"
        )
    if importlib.util.find_spec("nccl") is None:
        obstacles.append(
            'the Python package nccl4py is missing; install hpctrain[gpu] (pip install nccl4py), or use "mpi"'
        )
    return obstacles


TRANSPORTS: Mapping[str, TransportChoice] = {
    "nccl": TransportChoice(_nccl, _own_gpus, _nccl_obstacles, on_host=False),
    "shared": TransportChoice(_shared, _several_on_cpus, _shared_obstacles, on_host=True),
    "mpi": TransportChoice(_mpi, lambda _: True, lambda _: [], on_host=True),
}
