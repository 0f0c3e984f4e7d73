"""Transport for tensors in CPU memory over torch's ProcessGroupGloo, by TCP.

gloo's threads carry out all operations, also while this rank computes. Messages have tags.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

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
from hpctrain.comm.transports.transport import TransportWork
from hpctrain.errors import CommunicationError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]
    from torch.distributed import Work as TorchWork

    from hpctrain.comm.transports.setting import TransportSetting


THREADS = 2
"""Number of threads that carry out the operations of a process group, as many as torch makes by default."""


class GlooMessages(ProcessGroupWork):
    """Handle of messages. gloo reports that one is complete only in a blocking wait.

    So the first `test` starts a thread.
    """

    def __init__(self, name: str, works: Sequence[TorchWork], *tensors: Tensor) -> None:
        super().__init__(name, works, *tensors)
        self._complete = Event()
        self._thread: Thread | None = None
        self._error: CommunicationError | None = None

    def _run(self) -> None:
        try:
            super().wait()
        except CommunicationError as error:
            self._error = error
        self._complete.set()

    @override
    def wait(self) -> None:
        if self._thread is None:
            super().wait()
            return
        self._complete.wait()
        if self._error is not None:
            raise self._error

    @override
    def test(self) -> bool:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="gloo", daemon=True)
            self._thread.start()
        if not self._complete.is_set():
            return False
        self.wait()
        return True


def selected_interfaces(environment: Mapping[str, str]) -> list[str]:
    """Return the names of network interfaces in GLOO_SOCKET_IFNAME; an empty list if it is not set."""
    return [name for name in environment.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def connect_gloo(store: Store, rank: int, size: int, name: str) -> Any:
    """Make a ProcessGroupGloo and connect its ranks. Collective over them.

    It uses the network interfaces of GLOO_SOCKET_IFNAME, by default the one of this node's host name.

    Args:
        store: Part of the store that belongs to these ranks alone.
        rank: This rank in the process group.
        size: Number of ranks.
        name: Name by which torch's flight recorder knows the group.
    """
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined, unused-ignore]
    options._devices = [
        ProcessGroupGloo.create_device(interface=name) for name in selected_interfaces(os.environ)
    ] or [ProcessGroupGloo.create_default_device()]
    options._timeout, options._threads, options.group_name = TIMEOUT, THREADS, name
    return ProcessGroupGloo(store, rank, size, options)


class GlooTransport(ProcessGroupTransport):
    """Transport for tensors in CPU memory. The constructor is collective, and connects all ranks.

    Args:
        setting: Settings of the group of ranks, with a store.
    """

    def __init__(self, setting: TransportSetting) -> None:
        store, name = setting.group_store.of_group(setting.communicator, setting.name)
        super().__init__(
            setting, connect_gloo(store, setting.communicator.rank, setting.communicator.size, name)
        )

    @override
    def reduce_scatter(self, call: Call) -> TransportWork | None:
        """Reduce in rank order: gloo's own reduce-scatter sends twice as much."""
        return self.start_reduction(call)

    def send(self, call: Call) -> TransportWork | None:
        """Send `call.tensor` to the rank `call.peer`, or start that. Local.

        Returns:
            None if the call is blocking, otherwise the handle of the operation.
        """
        return self._message(call, [self.group.send([bytes_of(call.tensor)], call.peer, call.tag)])

    def recv(self, call: Call) -> TransportWork | None:
        """Receive a message of the rank `call.peer` into `call.output`, or start that. Local.

        Returns:
            None if the call is blocking, otherwise the handle of the operation.
        """
        return self._message(call, [self.group.recv([bytes_of(call.output)], call.peer, call.tag)])

    def _message(self, call: Call, works: Sequence[TorchWork]) -> TransportWork | None:
        assert call.memory is not None
        return self.finish(True, works) if call.blocking else GlooMessages(self.name, works, call.memory)

    def barrier(self, call: Call) -> TransportWork | None:
        """Wait until every rank has made the call, or start that. Collective.

        Returns:
            None if the call is blocking, otherwise a handle that is complete when every rank has made the
            call.
        """
        return self.finish(call.blocking, [self.group.barrier()])

    @override
    def start_messages(self, messages: Sequence[PieceMessage], tag: int) -> ProcessGroupWork:
        works = [
            (self.group.send if message.sends else self.group.recv)([message.memory], message.peer, tag)
            for message in messages
        ]
        return GlooMessages(self.name, works, *(message.memory for message in messages))
