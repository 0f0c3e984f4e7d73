"""Settings of the transports of one group of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hpctrain.comm.transports.node_memory import NodeMemory
from hpctrain.comm.transports.process_group import GroupStore
from hpctrain.comm.transports.reduction import ReductionScratch
from hpctrain.host.mpi_library import MPI


class TransportSetting(NamedTuple):
    """Arguments of the functions that make the transports of a group.

    Attributes:
        communicator: Communicator of the group.
        axes: Names of its axes.
        device: Device of this rank.
        nodes: Node of each rank of the group.
        scratch: Memory that reductions receive into.
        memory: Shared memory of this rank's node; None if its ranks do not share memory.
        store: Store in which the ranks of a process group find each other; None if none is open.
        native_half_sums: True if process groups add 16-bit floats themselves.
    """

    communicator: MPI.Intracomm
    axes: tuple[str, ...]
    device: torch.device
    nodes: Sequence[int]
    scratch: ReductionScratch
    memory: NodeMemory | None
    store: GroupStore | None
    native_half_sums: bool = False

    @property
    def name(self) -> str:
        """Name of the group: its axes."""
        return " x ".join(self.axes)

    @property
    def group_store(self) -> GroupStore:
        """The store, which `World.open_store` must have opened."""
        assert self.store is not None, "World.open_store comes first"
        return self.store
