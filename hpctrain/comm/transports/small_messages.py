"""Operations on small tensors among the ranks of a node, in as few steps as can be.

Each rank copies what it gives to where all others read it, and counts the operation; who sees everybody's
count takes what it needs. There are two places for it, in turn: who comes to the operation after the next one
has seen that all were at the next one, and so are done with this one. Sums are added by every rank, in rank
order, with the bits of `reduction`.
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
from hpctrain.comm.transports.mpi import flat_view
from hpctrain.comm.transports.node_memory import MemoryLocation, NodeMemory
from hpctrain.comm.transports.reduction import reduce_block
from hpctrain.host.mpi_library import MPI

SMALL_OPERATION_BYTES = 256 * 1024
"""Of all ranks' copies together: what lies in a processor's cache, and is read by every rank."""

_ALIGNED = 64
_TURNS = 2
_KNOWN = 64  # forms of tensors whose copies are found at once
_SPINS, _YIELDS = 100, 10_000  # looks after which one that waits lets others have the core, or sleeps
_SLEEP = 50e-6


class SmallOperations:
    """What the ranks of a group give each other in blocking operations of at most `most` bytes."""

    def __init__(
        self,
        rank: int,
        copies: Sequence[Sequence[Tensor]],
        counts: Sequence[tuple[memoryview, int]],
        fence: Callable[[], None],
        progress: Callable[[], object],
    ) -> None:
        """`copies` are memory of each rank in each turn; `counts` each rank's own, and what it was before.
        `progress` helps along what else is under way, for others may wait for that.
        """
        self.rank, self.size, self.most = rank, len(counts), copies[0][0].numel()
        self._copies, self._fence, self._progress = copies, fence, progress
        self._addresses = [[copy.data_ptr() for copy in turn] for turn in copies]
        self._own, self._before = counts[rank]
        self._others = [each for peer, each in enumerate(counts) if peer != rank]
        self._known: dict[tuple[int, int, int, torch.dtype], list[Tensor]] = {}
        self._done = 0

    def run(self, call: Call) -> None:
        """An all_reduce, reduce_scatter or all_gather; the same for all ranks."""
        tensor, output = call.tensor, call.output
        assert tensor is not None and output is not None
        self._done = number = self._done + 1
        turn = number % _TURNS
        memmove(self._addresses[turn][self.rank], tensor.data_ptr(), tensor.nbytes)
        self._fence()
        self._own[0] = self._before + number
        for count, before in self._others:
            if count[0] < before + number:
                self._wait(count, before + number)
        self._fence()
        if call.operation == "all_gather":
            self._take(turn, tensor, output, call.counts)
            return
        assert call.reduced is not None
        begin, length = 0, output.numel()
        if call.operation == "reduce_scatter":
            begin = self.rank * length if call.counts is None else sum(call.counts[: self.rank])
        # All parts are copies, so that sums between them can be where the last one is to be.
        reduce_block(self._parts(turn, begin, length, tensor.dtype), flat_view(output), call.reduced, 0)

    def _take(self, turn: int, tensor: Tensor, output: Tensor, counts: Sequence[int] | None) -> None:
        """Copy what each rank has given to its place in `output`."""
        address, itemsize, share = output.data_ptr(), tensor.itemsize, tensor.nbytes
        for peer, copy in enumerate(self._addresses[turn]):
            size = share if counts is None else counts[peer] * itemsize
            if peer != self.rank or address != tensor.data_ptr():
                memmove(address, copy, size)
            address += size

    def _parts(self, turn: int, begin: int, length: int, dtype: torch.dtype) -> list[Tensor]:
        """So many elements of each rank's copy."""
        form = turn, begin, length, dtype
        parts = self._known.get(form)
        if parts is None:
            if len(self._known) == _KNOWN:
                self._known.clear()
            first, last = begin * dtype.itemsize, (begin + length) * dtype.itemsize
            parts = self._known[form] = [copy[first:last].view(dtype) for copy in self._copies[turn]]
        return parts

    def _wait(self, count: memoryview, least: int) -> None:
        looks = 0
        while count[0] < least:
            looks += 1
            if looks > _SPINS:
                self._progress()
                if looks > _YIELDS:
                    time.sleep(_SLEEP)
                else:
                    os.sched_yield()


def small_operation_bytes(size: int) -> int:
    """The most that an operation of so many ranks has of each."""
    return SMALL_OPERATION_BYTES // size // _ALIGNED * _ALIGNED


def open_small_operations(communicator: MPI.Intracomm, memory: NodeMemory) -> SmallOperations | None:
    """Those of a group of a node; None, on all ranks, where one has no memory for it. Collective."""
    ranks = tuple(communicator.allgather(memory.rank))
    free = memory.inline.setdefault(ranks, [])
    most = small_operation_bytes(len(ranks))
    offset = free.pop() if free else memory.take(PAGESIZE + _TURNS * most)
    told = communicator.allgather(
        None if offset is None else (offset, memory.words(MemoryLocation(memory.rank, offset), 1)[0])
    )
    places = [each for each in told if each is not None]
    if len(places) < len(told):
        if offset is not None:
            free.append(offset)
        return None
    pairs = list(zip(ranks, places, strict=True))
    copies = [
        [
            memory.at(MemoryLocation(owner, start + PAGESIZE + turn * most), most, torch.uint8)
            for owner, (start, _) in pairs
        ]
        for turn in range(_TURNS)
    ]
    counts = [(memory.words(MemoryLocation(owner, start), 1), count) for owner, (start, count) in pairs]
    inline = SmallOperations(communicator.rank, copies, counts, memory.fence, memory.progress)
    # A later group of the very same ranks, who are all done with what was, goes on with the count.
    assert offset is not None
    weakref.finalize(inline, free.append, offset).atexit = False
    return inline
