"""What tensors travel over, by name: for each, what carries those in host memory and those of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from hpctrain.comm.library import MPI
from hpctrain.comm.mpi import MpiTransport
from hpctrain.comm.reduction import ReductionScratch
from hpctrain.comm.staged import StagedTransport
from hpctrain.comm.transport import Transport

Name = Literal["mpi", "nccl"]
Pair = tuple[Transport, Transport]


def _mpi(communicator: MPI.Intracomm, scratch: ReductionScratch) -> Pair:
    host = MpiTransport(communicator, scratch)
    return host, StagedTransport(host)


def _nccl(communicator: MPI.Intracomm, scratch: ReductionScratch) -> Pair:
    from hpctrain.comm.nccl import NcclTransport

    return MpiTransport(communicator, scratch), NcclTransport(communicator, scratch)


TRANSPORTS: Mapping[Name, Callable[[MPI.Intracomm, ReductionScratch], Pair]] = {"mpi": _mpi, "nccl": _nccl}
