"""Groups of ranks that are not there: what they are asked to move, the ledger counts, and nothing moves."""

from __future__ import annotations

from typing import Any

import torch

from hpctrain.comm.calls import Call
from hpctrain.comm.group import Group
from hpctrain.comm.ledger import Ledger
from hpctrain.comm.mpi import scratch_bytes
from hpctrain.comm.transport import Transport

META = torch.device("meta")


class PlannedTransport(Transport):
    """Completes every call at once; small values are the same on all ranks. Its memory is that of MPI."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def run(self, call: Call) -> None:
        """See Transport."""

    def scratch_bytes(self, elements: int, itemsize: int) -> int:
        """See Transport."""
        return scratch_bytes(elements, itemsize, self.size)

    def allgather(self, value: Any, /) -> list[Any]:
        """See Objects."""
        return [value] * self.size

    def bcast(self, value: Any, root: int, /) -> Any:  # noqa: ARG002
        """See Objects."""
        return value


def planned_group(axes: tuple[str, ...], rank: int, size: int, ledger: Ledger) -> Group:
    """A group that knows its rank and size alone, on torch's device "meta"."""
    planned = PlannedTransport(rank, size)
    return Group(axes, tuple(range(size)), planned, planned, planned, META, ledger, set())
