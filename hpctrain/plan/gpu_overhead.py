"""Memory of a GPU outside torch's tensors: CUDA's context, buffers of NCCL, and fragmentation.

A run measures the first two when its communicators are connected (`train/gpu_memory.py`), since they depend
on the GPU, its links and the versions of CUDA and NCCL.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hpctrain.comm.group import Group
from hpctrain.comm.transports.choose import POINT_TO_POINT_AXES
from hpctrain.comm.transports.nccl import CHANNEL_BLOCKS
from hpctrain.costs.memory_account import MemoryAccount

_MIB = 1 << 20

CONTEXT_BYTES = 600 * _MIB
"""Bytes of CUDA's context with the kernels of torch, cuBLAS and NCCL that a step loads.

`nvidia-smi` shows 500 to 600 MiB for a process on A100 and H100 GPUs before its first large tensor.
"""

RECEIVE_BYTES, SEND_BYTES = 10 * _MIB, 2 * _MIB
"""Bytes of the buffers of one NCCL channel from one peer, and to one peer.

NCCL's `src/init.cc` has 4 MiB for the protocol Simple, 120 x 640 x 8 x 8 bytes for LL128 and 8 x 512 x 8 x 16
bytes for LL, together 9.2 MiB. Memory is allocated in pages of 2 MiB. These are also the sizes of
allocations that https://github.com/NVIDIA/nccl/issues/1685 lists.
"""

COLLECTIVE_CHANNELS, MESSAGE_CHANNELS = 24, 32
"""Number of channels of collective operations, and of messages to one peer, on nodes with NVSwitch.

NCCL logs them when it connects: "24 coll channels, ..., 32 p2p channels per peer". GPUs on PCI Express have
fewer.
"""

SWITCH_BYTES = 32 * _MIB
"""Bytes of the buffers of NVLink SHARP for each GPU of a group on one node: 16 channels, 2 directions, 1 MiB.

NCCL allocates them in `ncclNvlsBufferSetup` (`src/transport/nvls.cc`).
"""

GPUS_PER_NODE = 8
"""Largest number of ranks of a group that are assumed to share a node."""

FRAGMENTED_FRACTION = 1 / 32
"""Fraction of the memory that each step allocates and frees that is lost to fragmentation.

This is an assumption for expandable segments, with which torch's allocator fills pages of 2 MiB.
"""

SEARCH_RESERVE = 0.05
"""Fraction of a GPU's memory that a layout chosen by `layout.auto` leaves free, since plans are not exact."""


def with_gpu_overhead(memory: MemoryAccount, groups: Iterable[Group], transport: str) -> MemoryAccount:
    """Return the memory account of a rank on a GPU, with the memory outside torch's tensors. Local.

    Args:
        memory: Memory account of its tensors.
        groups: Groups through which the rank sends tensors.
        transport: Name of the transport in the deck, or "auto", which is NCCL among GPUs.
    """
    connected = groups if transport in {"auto", "nccl"} else ()
    runtime = CONTEXT_BYTES + sum(map(communicator_bytes, connected))
    allocated_in_step = memory.activation + memory.buffer + memory.other
    return replace(memory, runtime=runtime, fragmented=int(FRAGMENTED_FRACTION * allocated_in_step))


def communicator_bytes(group: Group) -> int:
    """Return the bytes of NCCL's buffers for all operations of a group; 0 for one rank. Local.

    Collective operations have connections to two neighbors in a ring. So do messages of pipelines and of ring
    attention, in communicators of their own with fewer blocks (`comm/transports/nccl.py`). Exchanges among
    experts have connections to all ranks of the node.
    """
    peers = min(group.size, GPUS_PER_NODE) - 1
    neighbors = min(peers, 2)
    channel = RECEIVE_BYTES + SEND_BYTES
    collective = COLLECTIVE_CHANNELS * neighbors * channel
    switch = SWITCH_BYTES * (peers + 1) if peers > 1 else 0
    messages = CHANNEL_BLOCKS * neighbors * channel if group.axes in POINT_TO_POINT_AXES else 0
    exchange = MESSAGE_CHANNELS * peers * channel if group.axes == ("expert",) else 0
    return collective + switch + messages + exchange
