"""Transport among GPUs over process groups of torch that have the rules of NCCL.

They are ProcessGroupNCCL (NCCL on NVIDIA GPUs, RCCL on AMD GPUs) and ProcessGroupXCCL (oneCCL on Intel GPUs).
All operations are ordered on streams, and the host never waits. A process group runs its operations on a
stream of its own, which first waits for the stream that is current. Waiting for a handle makes the stream
that is current then wait for the operation; a blocking call does so at once.

NCCL has no tags, and runs the operations of one communicator one after another. So a message whose peer is
not ready would delay all later operations. Therefore, groups along which layers send messages have a process
group of two ranks, a *channel*, for each pair of neighbors in the ring of ranks and each direction. On it,
sends and receives match in the order in which they are started. Channels are connected when the group is
made, in the same order on all ranks, so that no message ever creates a communicator. A started receive
occupies the GPU until the message arrives, so start it only shortly before its data is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.calls import Call
from hpctrain.comm.transports.process_group import (
    TIMEOUT,
    PieceMessage,
    ProcessGroupTransport,
    ProcessGroupWork,
    bytes_of,
)
from hpctrain.comm.transports.reduction import reduce_in_rank_order
from hpctrain.comm.transports.transport import TransportWork, run_steps
from hpctrain.host.streams import SideStream

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from hpctrain.comm.transports.setting import TransportSetting


CHANNEL_BLOCKS = 8
"""Largest number of blocks (CTAs) of a message on a channel, of 132 of an H100 that compute meanwhile.

A message that waits for its peer occupies its blocks. NCCL by itself takes up to 32.
"""


def connect_nccl(
    store: Store, rank: int, size: int, name: str, device: torch.device, is_channel: bool
) -> Any:
    """Make the process group of a type of GPU and connect its ranks. Collective over them.

    Once connected, it also uses its communicator for messages, and never creates another one.
    ProcessGroupXCCL has no call that connects, but does so in its first collective operation.

    Args:
        store: Part of the store that belongs to these ranks alone.
        rank: This rank in the process group.
        size: Number of ranks.
        name: Name by which torch's flight recorder knows the group.
        device: GPU of this rank.
        is_channel: True if the process group only carries messages, which then take CHANNEL_BLOCKS.
    """
    is_intel = device.type == "xpu"
    kind: Any = getattr(torch.distributed, "ProcessGroupXCCL" if is_intel else "ProcessGroupNCCL")
    options = kind.Options()
    options._timeout = TIMEOUT
    options.group_name = name
    # torch has 32 streams of each priority. Those of other priority are left to copies and computing.
    if not is_intel:
        options.is_high_priority_stream = True
    if is_channel and not is_intel:
        options.config.max_ctas = CHANNEL_BLOCKS
    group = kind(store, rank, size, options)
    if is_intel:
        group.allreduce([torch.zeros(1, device=device)]).wait()
    else:
        group.eager_connect_single_device(device)
    return group


class NcclTransport(ProcessGroupTransport):
    """Transport for tensors of one GPU per rank. The constructor is collective, and connects all ranks.

    Args:
        setting: Settings of the group of ranks, with a store.
        has_channels: True to make channels. Without them, and between ranks that are no neighbors, all ranks
            must start messages in an order that cannot deadlock on one communicator.
        connect: Function that makes and connects a process group.
    """

    completes_on_stream = True

    def __init__(
        self,
        setting: TransportSetting,
        has_channels: bool,
        connect: Callable[[Store, int, int, str, torch.device, bool], Any] = connect_nccl,
    ) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        rank, size, device = setting.communicator.rank, setting.communicator.size, setting.device
        own, name = setting.group_store.of_group(setting.communicator, setting.name)
        super().__init__(setting, connect(own, rank, size, name, device, False))
        self._side = SideStream()
        self._channels: dict[tuple[int, int], Any] = {}
        pairs = {pair for first in range(size) for pair in _directions(first, (first + 1) % size)}
        for pair in sorted(pairs) if has_channels and size > 1 else ():
            if rank in pair:
                way = f"{pair[0]} to {pair[1]}"
                place = PrefixStore(way, own), pair.index(rank), 2
                self._channels[pair] = channel = connect(*place, f"channel {way} of {name}", device, True)
                setting.group_store.keep(channel, self)

    @override
    def start_reduction(self, call: Call) -> TransportWork | None:
        """Queue a reduction in rank order, on the current stream if the call is blocking. Collective.

        Returns:
            None if the call is blocking, otherwise the handle of the work on a side stream.
        """
        steps = reduce_in_rank_order(self, call)
        if call.blocking:
            return run_steps(steps, True)
        return self._side.start(lambda: run_steps(steps, True), [call.tensor, call.output])

    def send(self, call: Call) -> TransportWork | None:
        """Queue a message to the rank `call.peer`. Local.

        Returns:
            None if the call is blocking, otherwise the handle of the operation.
        """
        return self._message(call, (self.rank, call.peer), bytes_of(call.tensor))

    def recv(self, call: Call) -> TransportWork | None:
        """Queue the receipt of a message of the rank `call.peer` into `call.output`. Local.

        Returns:
            None if the call is blocking, otherwise the handle of the operation.
        """
        return self._message(call, (call.peer, self.rank), bytes_of(call.output))

    def _message(self, call: Call, pair: tuple[int, int], memory: Tensor) -> TransportWork | None:
        channel, sends = self._channels.get(pair), pair[0] == self.rank
        group, peer = (self.group, call.peer) if channel is None else (channel, 1 - pair.index(self.rank))
        works = [_grouped(group, [PieceMessage(sends, memory, peer)])] if len(memory) else []
        return self.finish(call.blocking, works, memory)

    @override
    def start_messages(self, messages: Sequence[PieceMessage], tag: int) -> ProcessGroupWork:
        works = [_grouped(self.group, messages)] if messages else []
        return ProcessGroupWork(self.name, works, *(message.memory for message in messages))


def _directions(first: int, second: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the two pairs (sender, receiver) of two ranks."""
    return (first, second), (second, first)


def _grouped(group: Any, messages: Sequence[PieceMessage]) -> Any:
    """Start messages that make progress together, and return torch's handle of them all."""
    group._start_coalescing()
    for message in messages:
        (group.send if message.sends else group.recv)([message.memory], message.peer, 0)
    return group._end_coalescing()
