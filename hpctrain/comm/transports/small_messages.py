"""Operations on small tensors among the ranks of a node, in as few steps as possible.

Each rank copies its tensor to memory that all ranks read, and increments its counter. When a rank sees the
counters of all others, it takes what it needs. Every rank adds for itself, in rank order, with the bits of
`reduction`.

Consecutive operations use two copies of the memory alternately. When a rank begins operation n, it has seen
all counters of operation n - 1, so all ranks have finished operation n - 2. It may therefore overwrite the
copy that operation n - 2 has used.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove
from mmap import PAGESIZE

import torch
from torch import Tensor

from hpctrain.comm.calls import Call
from hpctrain.comm.transports.node_memory import MemoryLocation, NodeMemory
from hpctrain.comm.transports.progress_counters import CounterWork
from hpctrain.comm.transports.reduction import reduce_block
from hpctrain.comm.transports.transport import flat_view
from hpctrain.host.mpi_library import MPI

SMALL_OPERATIONS = frozenset({"all_reduce", "reduce_scatter", "all_gather"})

SMALL_OPERATION_BYTES = 256 * 1024
"""Bytes of all ranks' tensors together, which fit in a processor's cache and are read by every rank."""

PAIR_BYTES = 8 * 1024
"""Smallest sum of two ranks, in bytes, for SmallOperations. For more ranks, MPI is slower at any size."""

_ALIGNMENT = 64
_COPIES = 2
_SPINS = 100  # tests of a counter before a waiting rank lets its MPI messages make progress
_CACHED_VIEWS = 64  # shapes of tensors for which views of the copies are kept


class SmallOperations:
    """Blocking operations of a group on small tensors. The constructor is local.

    Args:
        communicator: Communicator of the group.
        memory: Memory of the node, to which all ranks belong.
        users: For each rank of the group, its rank in the world of all processes.

    Attributes:
        least_bytes: Smallest sum, in bytes, that is run.
        most_bytes: Largest operation, in bytes, that is run; -1 if a rank cannot get memory for it.
    """

    def __init__(self, communicator: MPI.Intracomm, memory: NodeMemory, users: tuple[int, ...]) -> None:
        self.rank, self.size, self.users = communicator.rank, communicator.size, users
        self.least_bytes = PAIR_BYTES if self.size == 2 else 0
        self.most_bytes = small_operation_bytes(self.size)
        self._communicator, self._memory = communicator, memory
        self._copies: list[list[Tensor]] = []  # for each copy, the memory of each rank
        self._addresses: list[list[int]] = []
        self._counts: list[tuple[memoryview, int]] = []  # each rank's counter, and its first value
        self._views: dict[tuple[int, int, int, torch.dtype], list[Tensor]] = {}
        self._operations = 0

    def run(self, call: Call) -> bool:
        """Run a call if it is small and blocking, and return True; otherwise do nothing and return False.

        Collective; the result is the same on all ranks. If it is True, this has waited for all ranks. A call
        is small if its `bytes` are at most `most_bytes`, and those of a reduction at least `least_bytes`. The
        first such call allocates memory, for which it waits for all ranks; if one of them cannot get any,
        this and all later calls return False on all ranks.

        Args:
            call: A call of the group, on tensors in host memory. Operations other than those of
                SMALL_OPERATIONS, and reductions of integers, are never run.
        """
        if not call.blocking or call.bytes > self.most_bytes or call.operation not in SMALL_OPERATIONS:
            return False
        tensor, output, reduction = call.tensor, call.output, call.reduction
        assert tensor is not None and output is not None
        if reduction is not None and (not tensor.is_floating_point() or call.bytes < self.least_bytes):
            return False
        if not self._copies and not self._open():
            return False
        self._operations = number = self._operations + 1
        copy = number % _COPIES
        memmove(self._addresses[copy][self.rank], tensor.data_ptr(), tensor.nbytes)
        self._memory.fence()
        counter, initial = self._counts[self.rank]
        counter[0] = initial + number
        for counter, initial in self._counts:
            for _ in range(_SPINS):
                if counter[0] >= initial + number:
                    break
            else:
                CounterWork([(counter, 0, initial + number)], self._memory).wait()
        self._memory.fence()
        if reduction is None:
            self._gather(copy, tensor, output, call.counts)
            return True
        begin, length = 0, output.numel()
        if call.operation == "reduce_scatter":
            begin = self.rank * length if call.counts is None else sum(call.counts[: self.rank])
        # All parts are copies, so that intermediate sums may lie in the output.
        parts = self._parts(copy, begin, length, tensor.dtype)
        reduce_block(parts, flat_view(output), reduction, 0)
        return True

    def _gather(self, copy: int, tensor: Tensor, output: Tensor, counts: Sequence[int] | None) -> None:
        address, itemsize, share = output.data_ptr(), tensor.itemsize, tensor.nbytes
        for peer, source in enumerate(self._addresses[copy]):
            size = share if counts is None else counts[peer] * itemsize
            if peer != self.rank or address != tensor.data_ptr():
                memmove(address, source, size)
            address += size

    def _parts(self, copy: int, begin: int, length: int, dtype: torch.dtype) -> list[Tensor]:
        """Return a range of elements of each rank's memory."""
        key = copy, begin, length, dtype
        parts = self._views.get(key)
        if parts is None:
            if len(self._views) == _CACHED_VIEWS:
                self._views.clear()
            first, last = begin * dtype.itemsize, (begin + length) * dtype.itemsize
            parts = self._views[key] = [memory[first:last].view(dtype) for memory in self._copies[copy]]
        return parts

    def _open(self) -> bool:
        """Allocate the memory. Collective. Return False on all ranks if a rank cannot get any."""
        memory, most = self._memory, small_operation_bytes(self.size)
        # A later group of the same ranks may use the memory and continues the count.
        offset = memory.reuse(("small operations", *self.users), PAGESIZE + _COPIES * most, self)
        local = None if offset is None else MemoryLocation(memory.rank, offset)
        locations = self._communicator.allgather(local and (local, memory.words(local, 1)[0]))
        if None in locations:
            self.most_bytes = -1
            return False
        self._counts = [(memory.words(location, 1), count) for location, count in locations]
        for start in range(PAGESIZE, PAGESIZE + _COPIES * most, most):
            places = [MemoryLocation(owner, begin + start) for (owner, begin), _ in locations]
            self._copies.append([memory.tensor_at(place, most, torch.uint8) for place in places])
        self._addresses = [[each.data_ptr() for each in copy] for copy in self._copies]
        return True


def small_operation_bytes(size: int) -> int:
    """Return the largest `Call.bytes` that SmallOperations of `size` ranks run, the same for each operation.

    Local.
    """
    return SMALL_OPERATION_BYTES // size // _ALIGNMENT * _ALIGNMENT
