"""Operations on small tensors among the ranks of a node, in as few steps as possible.

Each rank copies its tensor to memory that all ranks read, and increments its counter. When a rank sees the
counters of all others, it takes what it needs. Every rank adds for itself, in rank order, with the bits of
`reduction`.

Consecutive operations use two copies of the memory alternately. When a rank begins operation n, it has seen
all counters of operation n - 1, so all ranks have finished operation n - 2. It may therefore overwrite the
copy that operation n - 2 has used.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from ctypes import memmove
from mmap import PAGESIZE

import torch
from torch import Tensor

from hpctrain.comm.calls import Call
from hpctrain.comm.transports.node_memory import MemoryLocation, NodeMemory
from hpctrain.comm.transports.reduction import reduce_block
from hpctrain.comm.transports.transport import flat_view
from hpctrain.host.mpi_library import MPI

SMALL_OPERATION_BYTES = 256 * 1024
"""Bytes of all ranks' tensors together, which fit in a processor's cache and are read by every rank."""

_ALIGNMENT = 64
_COPIES = 2
_CACHED_VIEWS = 64  # shapes of tensors for which views of the copies are kept
_SPINS, _YIELDS = 100, 10_000  # tests after which a waiting rank yields the core, and sleeps
_SLEEP = 50e-6


class SmallOperations:
    """Blocking operations of a group on tensors of at most `most` bytes.

    Args:
        rank: This rank in the group.
        copies: For each of the two copies, the memory of each rank.
        counts: For each rank its counter, and the value that it had before the first operation.
        fence: Function that orders this rank's reads and writes of memory.
        progress: Function that lets other operations of this rank make progress while it waits.
    """

    def __init__(
        self,
        rank: int,
        copies: Sequence[Sequence[Tensor]],
        counts: Sequence[tuple[memoryview, int]],
        fence: Callable[[], None],
        progress: Callable[[], object],
    ) -> None:
        self.rank, self.size, self.most = rank, len(counts), copies[0][0].numel()
        self._copies, self._fence, self._progress = copies, fence, progress
        self._addresses = [[memory.data_ptr() for memory in copy] for copy in copies]
        self._counter, self._initial_count = counts[rank]
        self._peer_counts = [each for peer, each in enumerate(counts) if peer != rank]
        self._views: dict[tuple[int, int, int, torch.dtype], list[Tensor]] = {}
        self._operations = 0

    def run(self, call: Call) -> None:
        """Run an all_reduce, reduce_scatter or all_gather. Collective."""
        tensor, output = call.tensor, call.output
        assert tensor is not None and output is not None
        self._operations = number = self._operations + 1
        copy = number % _COPIES
        memmove(self._addresses[copy][self.rank], tensor.data_ptr(), tensor.nbytes)
        self._fence()
        self._counter[0] = self._initial_count + number
        for counter, initial in self._peer_counts:
            if counter[0] < initial + number:
                self._wait(counter, initial + number)
        self._fence()
        if call.operation == "all_gather":
            self._gather(copy, tensor, output, call.counts)
            return
        assert call.reduction is not None
        begin, length = 0, output.numel()
        if call.operation == "reduce_scatter":
            begin = self.rank * length if call.counts is None else sum(call.counts[: self.rank])
        # All parts are copies, so that intermediate sums may lie in the output.
        parts = self._parts(copy, begin, length, tensor.dtype)
        reduce_block(parts, flat_view(output), call.reduction, 0)

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

    def _wait(self, counter: memoryview, value: int) -> None:
        tests = 0
        while counter[0] < value:
            tests += 1
            if tests > _SPINS:
                self._progress()
                if tests > _YIELDS:
                    time.sleep(_SLEEP)
                else:
                    os.sched_yield()


def small_operation_bytes(size: int) -> int:
    """Return the largest tensor of each rank, in bytes, for SmallOperations of `size` ranks."""
    return SMALL_OPERATION_BYTES // size // _ALIGNMENT * _ALIGNMENT


def open_small_operations(communicator: MPI.Intracomm, memory: NodeMemory) -> SmallOperations | None:
    """Allocate the memory for SmallOperations of a group whose ranks share a node. Collective.

    Returns:
        None on all ranks if a rank cannot get memory.
    """
    ranks = tuple(communicator.allgather(memory.rank))
    free = memory.free_small_operations.setdefault(ranks, [])
    most = small_operation_bytes(len(ranks))
    offset = free.pop() if free else memory.take(PAGESIZE + _COPIES * most)
    location = None
    if offset is not None:
        location = offset, memory.words(MemoryLocation(memory.rank, offset), 1)[0]
    gathered = communicator.allgather(location)
    locations = [each for each in gathered if each is not None]
    if len(locations) < len(gathered):
        if offset is not None:
            free.append(offset)
        return None
    owned = list(zip(ranks, locations, strict=True))
    copies = [
        [
            memory.tensor_at(MemoryLocation(owner, start + PAGESIZE + copy * most), most, torch.uint8)
            for owner, (start, _) in owned
        ]
        for copy in range(_COPIES)
    ]
    counts = [(memory.words(MemoryLocation(owner, start), 1), count) for owner, (start, count) in owned]
    operations = SmallOperations(communicator.rank, copies, counts, memory.fence, memory.progress)
    # A later group of the same ranks may use the memory and continues the count.
    assert offset is not None
    weakref.finalize(operations, free.append, offset).atexit = False
    return operations
