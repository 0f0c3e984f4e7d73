"""Emulation of a slow network on one machine: calls take as long as they would over a link of given speed.

Software delays the calls. It changes neither the calls and their order nor the bits of their results. Times,
and metrics that follow from them, are those of a network that does not exist; a run marks them as emulated.

Each rank has a link that sends and receives at the same time, at full speed in each direction. If nodes are
emulated (`communication.ranks_per_node`), the link of a rank is its equal share of the link of its node, and
transfers inside a node are not delayed. A transfer starts once all ranks of the group have made the call (for
a message, once it is sent) and the rank's earlier transfers in that direction are over. It takes the time for
its bytes (`Traffic`) at the speed of the link, plus the latency for each of its rounds. A started transfer
continues while the rank computes. Only tensors are delayed, not small Python values, parallel files or
comparisons of calls.

The ranks exchange the times at which they made a call, so all ranks must be on one machine, with one clock.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence

from typing_extensions import override

from hpctrain.comm.calls import Call
from hpctrain.comm.transports.mpi import MpiRequests
from hpctrain.comm.transports.traffic import Traffic, traffic_of
from hpctrain.comm.transports.transport import (
    Steps,
    Transport,
    TransportWork,
    WrappedTransport,
    run_steps,
)
from hpctrain.host.mpi_library import MPI
from hpctrain.units import Link


class EmulatedLink:
    """Link of one rank, with the times at which each direction becomes free.

    Args:
        link: Speed and latency.
        clock: Function that returns the time in seconds.
        sleep: Function that sleeps for a number of seconds.
    """

    def __init__(
        self,
        link: Link,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.link, self.clock, self.sleep = link, clock, sleep
        self._free_to_send = self._free_to_receive = float("-inf")

    def reserve(self, traffic: Traffic, start: float) -> float:
        """Queue a transfer on this rank's link behind earlier ones, and return the time at which it ends.

        Local. It does not wait; the caller does, for example with a TransferEnd. If the transfer has bytes in
        both directions, both are reserved, and the later end counts.

        Args:
            traffic: Bytes and rounds of the transfer.
            start: Earliest time at which it can start, in seconds of `clock`.

        Returns:
            Time of the end, in seconds of `clock`. It includes the latency of all rounds, during which later
            transfers of this rank may use the link.
        """
        ends = [start]
        if traffic.sent:
            self._free_to_send = max(start, self._free_to_send) + traffic.sent / self.link.bytes_per_second
            ends.append(self._free_to_send)
        if traffic.received:
            self._free_to_receive = (
                max(start, self._free_to_receive) + traffic.received / self.link.bytes_per_second
            )
            ends.append(self._free_to_receive)
        return max(ends) + traffic.rounds * self.link.latency


class TransferEnd:
    """Handle that is complete at the time `end` of a link's clock."""

    def __init__(self, link: EmulatedLink, end: float) -> None:
        self._link, self._end = link, end

    def wait(self) -> None:
        """Sleep until the time `end`; return at once if it has passed."""
        while (left := self._end - self._link.clock()) > 0:
            self._link.sleep(left)

    def test(self) -> bool:
        """Return True if the time `end` has come. Does not wait."""
        return self._link.clock() >= self._end


class EmulatedTransport(WrappedTransport):
    """Calls of another transport that take at least as long as over an emulated link.

    Args:
        inner: Transport that moves the data.
        communicator: Communicator over which ranks exchange times; nothing else may use it.
        link: Link of this rank.
        nodes: Node of each rank; None if each rank is a node of its own.
    """

    def __init__(
        self,
        inner: Transport,
        communicator: MPI.Intracomm,
        link: EmulatedLink,
        nodes: Sequence[int] | None = None,
    ) -> None:
        super().__init__(inner)
        self.communicator, self.link, self.nodes = communicator, link, nodes
        self._sent_times: list[MpiRequests] = []

    @override
    def run(self, call: Call) -> TransportWork | None:
        """Run or start a call of a Group that takes at least as long as over the emulated link.

        Collective, as the call.

        Returns:
            None if the call is blocking, after which the emulated transfer is over. Otherwise the handle,
            which is complete then.
        """
        return run_steps(self._steps(call), call.blocking)

    def _steps(self, call: Call) -> Steps:
        crosses_links_once = self.inner.crosses_links_once(call)
        traffic = traffic_of(call, self.rank, self.size, self.nodes, crosses_links_once)
        arrival = array("d", [self.link.clock()])
        times, exchange = self._exchange_times(call, arrival)
        yield self.inner.run(call)
        yield exchange
        yield TransferEnd(self.link, self.link.reserve(traffic, max(times)))

    def _exchange_times(self, call: Call, arrival: array[float]) -> tuple[array[float], TransportWork | None]:
        """Start to exchange the times at which ranks came to a call.

        Returns:
            The times of the ranks that this one depends on, and a handle that is complete once they are
            there.
        """
        if call.operation == "send":
            sent = MpiRequests([self.communicator.Isend([arrival, MPI.DOUBLE], call.peer, call.tag)])
            self._sent_times = [*(each for each in self._sent_times if not each.test()), sent]
            return arrival, None
        if call.operation == "recv":
            times = array("d", [0.0])
            return times, MpiRequests([self.communicator.Irecv([times, MPI.DOUBLE], call.peer, call.tag)])
        times = array("d", [0.0] * self.size)
        request = self.communicator.Iallgather([arrival, MPI.DOUBLE], [times, MPI.DOUBLE])
        return times, MpiRequests([request])
