"""Table of the transports that a deck can name, and when each of them can be used."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from hpctrain.comm.transports.hierarchical import HierarchicalTransport
from hpctrain.comm.transports.mpi import MpiTransport, StagedTransport
from hpctrain.comm.transports.setting import TransportSetting
from hpctrain.comm.transports.shared import SharedTransport
from hpctrain.comm.transports.transport import Transport
from hpctrain.host.topology import ranks_per_node_of
from hpctrain.text import ranges

POINT_TO_POINT_AXES = frozenset({("pipeline",), ("context",)})
"""Axes along which pipelines and ring attention send messages between neighbors."""

GpuNames = Sequence[str | None]
"""Name of each rank's GPU, which is unique in the job; None for a rank on a CPU."""

TransportPair = tuple[Transport, Transport]
"""Transport of tensors in CPU memory, and transport of tensors in GPU memory."""


class TransportChoice(NamedTuple):
    """Entry of TRANSPORTS.

    Attributes:
        make: Function that makes both transports of a group. Collective over the group.
        suits: Function that returns True if "auto" may choose this entry; the first such entry is chosen.
        obstacles: Function that returns the reasons why the ranks cannot use this transport, each with a
            remedy; an empty list if they can.
        uses_store: True if the store of process groups must be open before groups are made.
        on_host: True if the CPU carries out the calls, so that they take its time. False if the GPU does.
    """

    make: Callable[[TransportSetting], TransportPair]
    suits: Callable[[GpuNames], bool]
    obstacles: Callable[[GpuNames], list[str]]
    on_host: bool
    uses_store: bool = False


def _make_mpi(setting: TransportSetting) -> TransportPair:
    host = MpiTransport(setting.communicator, setting.scratch)
    return host, StagedTransport(host)


def _make_shared(setting: TransportSetting) -> TransportPair:
    """Use the memory of nodes if the group has several ranks on a node, and equally many on each one."""
    mpi = MpiTransport(setting.communicator, setting.scratch)
    host: Transport = mpi
    local_size = ranks_per_node_of(setting.nodes)
    if setting.memory is not None and local_size > 1:
        if local_size == mpi.size:
            host = SharedTransport(mpi, setting.memory)
        else:
            host = HierarchicalTransport(mpi, setting.memory, local_size)
    return host, StagedTransport(host)


def _make_gloo(setting: TransportSetting) -> TransportPair:
    if setting.communicator.size == 1:
        return _make_mpi(setting)
    from hpctrain.comm.transports.gloo import GlooTransport

    host = GlooTransport(setting)
    return host, StagedTransport(host)


def _make_nccl(setting: TransportSetting) -> TransportPair:
    if setting.communicator.size == 1:
        return _make_mpi(setting)
    from hpctrain.comm.transports.nccl import NcclTransport

    host = MpiTransport(setting.communicator, setting.scratch)
    return host, NcclTransport(setting, setting.axes in POINT_TO_POINT_AXES)


def _several_on_gpus(gpus: GpuNames) -> bool:
    return set(gpus) != {None} and len(gpus) > 1


def _several_on_cpus(gpus: GpuNames) -> bool:
    return set(gpus) == {None} and len(gpus) > 1


def _shared_obstacles(gpus: GpuNames) -> list[str]:
    if set(gpus) == {None}:
        return []
    return ['it moves tensors in CPU memory only, but a rank computes on a GPU; use "nccl", "mpi" or "auto"']


def _nccl_obstacles(gpus: GpuNames) -> list[str]:
    if set(gpus) == {None}:
        return ['no rank has a GPU; use "shared", "mpi" or "auto"']
    obstacles = []
    if None in gpus:
        obstacles.append('not every rank has a GPU; use "mpi" or "auto"')
    elif len(set(gpus)) < len(gpus) and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        name = Counter(gpus).most_common(1)[0][0]
        sharers = ranges((rank for rank, gpu in enumerate(gpus) if gpu == name), ",")
        obstacles.append(
            f'ranks {sharers} share one GPU ({name}); start one rank per GPU, use "mpi", '
            "or set NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or newer"
        )
    if not (torch.distributed.is_nccl_available() or torch.distributed.is_xccl_available()):
        obstacles.append('this build of torch has no NCCL or XCCL; install one for your GPUs, or use "mpi"')
    return obstacles


def _gloo_obstacles(_: GpuNames) -> list[str]:
    from hpctrain.comm.transports.gloo import selected_interfaces

    present = [name for _, name in socket.if_nameindex()]
    return [
        f"GLOO_SOCKET_IFNAME={name}: {socket.gethostname()} has no such network interface; "
        f"it has {', '.join(present)}"
        for name in selected_interfaces(os.environ)
        if name not in present
    ]


TRANSPORTS: Mapping[str, TransportChoice] = {
    "nccl": TransportChoice(_make_nccl, _several_on_gpus, _nccl_obstacles, on_host=False, uses_store=True),
    "shared": TransportChoice(_make_shared, _several_on_cpus, _shared_obstacles, on_host=True),
    "mpi": TransportChoice(_make_mpi, lambda _: True, lambda _: [], on_host=True),
    "gloo": TransportChoice(_make_gloo, lambda _: False, _gloo_obstacles, on_host=True, uses_store=True),
}
