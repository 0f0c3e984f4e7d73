"""A slow link for trying things out on one machine: what a rank moves takes as long as such a link would
need.

It is a delay in software. Results, calls and their order are those of the ranks without it, to the bit;
seconds, and what is made of them, are those of a link that is not there, and are marked so wherever a run
writes them.

Each rank has one link, which carries bytes out and in at the same time, at its speed each way. Of emulated
nodes (`communication.ranks_per_node`) each has one, of which every rank has an even share, and what stays
inside a node passes none. A call begins to move once all ranks that take part have come to it (a message:
once it is sent), takes its turn behind what this rank moves already, and is complete no sooner than its
`Traffic` has passed and each of its rounds has taken the latency. What is started moves on while the rank
computes. Tensors travel so, those of the group of all ranks too; small Python values, by which ranks agree,
do not, nor does what h5py or a check of calls sends.

The ranks tell each other when they came, by clocks that have to be one and the same: those of one machine.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.calls import Call
from hpctrain.comm.transports.mpi import MpiRequests
from hpctrain.comm.transports.traffic import Traffic, traffic_of
from hpctrain.comm.transports.transport import Steps, Transport, TransportWork, run_steps
from hpctrain.host.mpi_library import MPI
from hpctrain.units import Link


class EmulatedLink:
    """The link of one rank, and when each of its directions is free again, by `clock` in seconds."""

    def __init__(
        self,
        link: Link,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.link, self.clock, self.sleep = link, clock, sleep
        self._out = self._in = float("-inf")

    def pass_over(self, traffic: Traffic, begin: float) -> float:
        """When this has passed, of what could move from `begin` on."""
        ends = [begin]
        if traffic.sent:
            self._out = max(begin, self._out) + traffic.sent / self.link.bytes_per_second
            ends.append(self._out)
        if traffic.received:
            self._in = max(begin, self._in) + traffic.received / self.link.bytes_per_second
            ends.append(self._in)
        return max(ends) + traffic.rounds * self.link.latency


class TransferEnd:
    """What is complete at a moment of a link's clock."""

    def __init__(self, link: EmulatedLink, moment: float) -> None:
        self._link, self._moment = link, moment

    def wait(self) -> None:
        """Let others have the core until then."""
        while (left := self._moment - self._link.clock()) > 0:
            self._link.sleep(left)

    def test(self) -> bool:
        """Whether it is time."""
        return self._link.clock() >= self._moment


class EmulatedTransport(Transport):
    """Another transport's calls, over a link; the ranks' times travel over a `communicator` of their own."""

    def __init__(
        self,
        inner: Transport,
        communicator: MPI.Intracomm,
        link: EmulatedLink,
        nodes: Sequence[int] | None = None,
    ) -> None:
        """`nodes` are those of the ranks, None where each is one by itself."""
        self.inner, self.communicator, self.link, self.nodes = inner, communicator, link, nodes
        self.rank, self.size, self.sharers = inner.rank, inner.size, inner.sharers
        self._told: list[tuple[MPI.Request, array[float]]] = []

    @override
    def run(self, call: Call) -> TransportWork | None:
        return run_steps(self._steps(call), call.blocking)

    @override
    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.empty(shape, dtype, device)

    @override
    def common_zeros(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        return self.inner.common_zeros(length, dtype, device)

    @override
    def crosses_once(self, call: Call) -> bool:
        return self.inner.crosses_once(call)

    @override
    def adds_once(self, call: Call) -> bool:
        return self.inner.adds_once(call)

    @override
    def scratch_bytes(self, elements: int, itemsize: int, scattered: bool = False) -> int:
        return self.inner.scratch_bytes(elements, itemsize, scattered)

    def _steps(self, call: Call) -> Steps:
        once = self.inner.crosses_once(call)
        traffic = traffic_of(call, self.rank, self.size, self.nodes, once)
        came = array("d", [self.link.clock()])
        times, telling = self._tell(call, came)
        yield self.inner.run(call)
        yield telling
        yield TransferEnd(self.link, self.link.pass_over(traffic, max(times)))

    def _tell(self, call: Call, came: array[float]) -> tuple[array[float], TransportWork | None]:
        """When the ranks came to a call on which this one waits; there once the TransportWork is complete."""
        if call.operation == "send":
            self._told = [each for each in self._told if not each[0].Test()]
            self._told.append((self.communicator.Isend([came, MPI.DOUBLE], call.peer, call.tag), came))
            return came, None
        if call.operation == "recv":
            times = array("d", [0.0])
            return times, MpiRequests([self.communicator.Irecv([times, MPI.DOUBLE], call.peer, call.tag)])
        times = array("d", [0.0] * self.size)
        return times, MpiRequests([self.communicator.Iallgather([came, MPI.DOUBLE], [times, MPI.DOUBLE])])
