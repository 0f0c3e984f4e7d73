"""Substitute of torch's ProcessGroupNCCL in CPU memory, made of gloo, with the rules of NCCL.

The operations of one process group run one after another, on a thread that stands for its stream. Messages
have no tags. Those that are started together make progress together; any other operation waits until the one
before is complete, and so delays all later ones if its peer is not ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from typing import Any, cast

import pytest
from torch import Tensor

from hpctrain.comm.transports.choose import POINT_TO_POINT_AXES, TRANSPORTS, TransportChoice
from hpctrain.comm.transports.gloo import connect_gloo
from hpctrain.comm.transports.mpi import MpiTransport, StagedTransport
from hpctrain.comm.transports.nccl import NcclTransport
from hpctrain.comm.transports.setting import TransportSetting
from hpctrain.comm.transports.transport import Transport


class StreamWork:
    """Operation on the thread of a process group, as torch's Work and as a TransportWork."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.action = action
        self.complete = Event()
        self.error: RuntimeError | None = None

    def run(self) -> None:
        """Carry it out."""
        try:
            self.action()
        except RuntimeError as error:
            self.error = error
        self.complete.set()

    def wait(self) -> None:
        """Wait for its end."""
        self.complete.wait()
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        """Return True after its end."""
        return self.complete.is_set()

    test = is_completed


class Stream:
    """Thread that runs operations in the order in which they are started."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[StreamWork] = SimpleQueue()
        self.thread = Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        """Run operations for ever."""
        while True:
            self.queue.get().run()

    def start(self, action: Callable[[], object], _: Sequence[Tensor | None] = ()) -> StreamWork:
        """Start an action; one that an action of this stream starts runs at once."""
        work = StreamWork(action)
        if current_thread() is self.thread:
            work.run()
        else:
            self.queue.put(work)
        return work


class GlooAsNccl:
    """Process group whose operations NcclTransport calls."""

    def __init__(self, store: Any, rank: int, size: int, name: str, *_: object) -> None:
        self.gloo: Any = connect_gloo(store, rank, size, name)
        self.shutdown, self.abort = self.gloo.shutdown, self.gloo.abort
        self.rank, self.size = rank, size
        self.stream = Stream()
        self.grouped: list[Callable[[], Any]] | None = None

    def collective(self, start: Callable[[], Any]) -> StreamWork:
        """Run an operation of gloo on the stream."""
        assert self.grouped is None
        return self.stream.start(lambda: start().wait())

    def allreduce(self, tensors: list[Tensor]) -> StreamWork:
        """Add in place."""
        return self.collective(lambda: self.gloo.allreduce(tensors))

    def reduce(self, tensor: Tensor, root: int, operator: Any) -> StreamWork:
        """Add on the root."""
        return self.collective(lambda: self.gloo.reduce(tensor, root, operator))

    def broadcast(self, tensor: Tensor, root: int) -> StreamWork:
        """Copy from the root."""
        return self.collective(lambda: self.gloo.broadcast(tensor, root))

    def _allgather_base(self, output: Tensor, tensor: Tensor) -> StreamWork:
        return self.collective(lambda: self.gloo._allgather_base(output, tensor))

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor) -> StreamWork:
        return self.collective(lambda: self.gloo._reduce_scatter_base(output, tensor))

    def _start_coalescing(self) -> None:
        assert self.grouped is None
        self.grouped = []

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        """Add a message to the group of messages."""
        assert self.grouped is not None and tag == 0
        self.grouped.append(lambda: self.gloo.send(tensors, peer, 0))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        """Add the receipt of a message to the group of messages."""
        assert self.grouped is not None and tag == 0
        self.grouped.append(lambda: self.gloo.recv(tensors, peer, 0))

    def _end_coalescing(self) -> StreamWork:
        starts, self.grouped = self.grouped or [], None

        def run() -> None:
            for work in [start() for start in starts]:
                work.wait()

        return self.stream.start(run)


class NcclRules(NcclTransport):
    """NcclTransport for tensors in CPU memory, over GlooAsNccl. The constructor is collective."""

    def __init__(self, setting: TransportSetting, has_channels: bool) -> None:
        super().__init__(setting, has_channels, GlooAsNccl)
        self._side = self.group.stream
        self.barrier = MpiTransport(setting.communicator, setting.scratch).barrier


def use_nccl_rules(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the rules of NCCL hold for groups that are made with this transport."""
    choice = TRANSPORTS[name]._replace(make=make_nccl_rules, uses_store=True)
    monkeypatch.setitem(cast("dict[str, TransportChoice]", TRANSPORTS), name, choice)


def make_nccl_rules(setting: TransportSetting) -> tuple[Transport, Transport]:
    """Make the transports of a group, as entries of TRANSPORTS do. Channels are made as for GPUs."""
    if setting.communicator.size == 1:
        return TRANSPORTS["mpi"].make(setting)
    transport = NcclRules(setting, setting.axes in POINT_TO_POINT_AXES)
    return transport, StagedTransport(transport)
