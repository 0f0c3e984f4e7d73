"""Stores for offloaded tensors, in pinned host memory or in files."""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.host.device import on_host
from hpctrain.host.streams import SideStream, StreamWork, empty_host_tensor
from hpctrain.memory.scratch import ScratchFile, ScratchFiles, Transfer


class OffloadHandle(Protocol):
    """Handle of one tensor in an OffloadStore, from `put` until `release`. All methods are local."""

    def advance(self) -> None:
        """Let the offload make progress, with little waiting."""

    def finish_offload(self) -> None:
        """Wait until the tensor is stored. Its memory may then be freed."""

    def start_fetch(self) -> None:
        """Start to fetch the tensor, after `finish_offload`. Does nothing if that has been started."""

    def fetch(self) -> Tensor:
        """Return the tensor on its device."""

    @property
    def memory(self) -> Tensor | None:
        """Memory of the device into which the tensor is being fetched, or None."""
        return None

    def release(self) -> None:
        """Free the space of the tensor in the store. Never waits and never fails."""


class DeviceCopies:
    """Copies between a GPU and pinned host memory, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = SideStream()
        self._free: defaultdict[int, list[tuple[Tensor, StreamWork | None]]] = defaultdict(list)

    def take(self, size: int) -> Tensor:
        """Return pinned memory of `size` bytes, to be given back.

        If `give` was called with a copy that may still read the memory, wait for that copy.
        """
        free = self._free[size]
        if not free:
            return empty_host_tensor((size,), torch.uint8, self.device)
        host, copy = free.pop()
        if copy is not None:
            copy.synchronize()
        return host

    def give(self, host: Tensor, copy: StreamWork | None = None) -> None:
        """Give pinned memory back.

        Args:
            host: The memory.
            copy: Copy to the device that may still read it; None if what uses it next is ordered after the
                copy by the stream.
        """
        self._free[host.numel()].append((host, copy))

    def start_copy_to_host(self, memory: Tensor, host: Tensor) -> StreamWork:
        """Start to copy to the host."""
        return self.stream.start(lambda: host.copy_(memory, non_blocking=True), [memory])


class HostOffloadStore(DeviceCopies):
    """Pinned memory of a GPU's host, for flat tensors of bytes [n] uint8."""

    def put(self, memory: Tensor) -> OffloadHandle:
        """Start to store a tensor, which must not be changed any more."""
        return _HostHandle(self, memory)


class _HostHandle(OffloadHandle):
    """Tensor that is copied to pinned memory of the host, and back when it is fetched."""

    def __init__(self, copies: DeviceCopies, memory: Tensor) -> None:
        self.copies = copies
        self.host = copies.take(memory.numel())
        self.out = copies.start_copy_to_host(memory, self.host)
        self.fetching: tuple[Tensor, StreamWork] | None = None

    @override
    def advance(self) -> None:
        pass

    @override
    def finish_offload(self) -> None:
        self.out.synchronize()

    @override
    def start_fetch(self) -> None:
        if self.fetching is None:
            self.fetching = self.copies.stream.copy_to_device(self.host, self.copies.device)

    @override
    def fetch(self) -> Tensor:
        self.start_fetch()
        assert self.fetching is not None
        memory, copy = self.fetching
        return copy.deliver(memory)

    @override
    def release(self) -> None:
        self.copies.give(self.host)


class Region:
    """Piece of a file.

    Attributes:
        file: The file.
        offset: First byte of the piece.
        busy: Transfers that may not be complete.
    """

    def __init__(self, file: ScratchFile, offset: int) -> None:
        self.file, self.offset = file, offset
        self.busy: list[Transfer] = []


class DiskOffloadStore:
    """Files for flat tensors of bytes [n] uint8.

    Args:
        scratch: Makes the files.
        capacity: Bytes of the first file; more files are made when it is full.
        device: Device of the tensors.
    """

    def __init__(self, scratch: ScratchFiles, capacity: int, device: torch.device) -> None:
        self.scratch, self.capacity = scratch, max(1, capacity)
        self.copies = None if on_host(device) else DeviceCopies(device)
        self._free: defaultdict[int, list[Region]] = defaultdict(list)
        self._files: list[ScratchFile] = []
        self._end = 0
        self._grow(self.capacity)

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self._files)

    def put(self, memory: Tensor) -> OffloadHandle:
        """Start to store a tensor, and return its handle."""
        return _DiskHandle(self, memory)

    def take(self, size: int) -> Region:
        """Return a free piece of a file, after waiting for the last transfers of its former contents.

        Files grow if no piece of this size is free.

        Raises:
            InputOutputError: The disk is full, or an earlier transfer of the piece failed.
        """
        free = self._free[size]
        if free:
            region = free.pop(0)
            for transfer in region.busy:
                transfer.result()
            region.busy.clear()
            return region
        if self._end + size > self._files[-1].size:
            self._grow(max(size, self.bytes // 2))
        region = Region(self._files[-1], self._end)
        self._end += size
        return region

    def give(self, region: Region, size: int) -> None:
        """Give a piece back, possibly before its last transfer is complete."""
        self._free[size].append(region)

    def _grow(self, size: int) -> None:
        self._files.append(self.scratch.file(f"activations-{len(self._files)}", size))
        self._end = 0


OffloadStore = HostOffloadStore | DiskOffloadStore


class _DiskHandle(OffloadHandle):
    """Handle of bytes in a file. Those of a GPU pass through pinned host memory."""

    def __init__(self, store: DiskOffloadStore, memory: Tensor) -> None:
        self.store, self.size = store, memory.numel()
        self.region = store.take(self.size)
        self.host: Tensor | None = None
        self.out: StreamWork | None = None
        self.writing: Transfer | None = None
        self.reading: Transfer | None = None
        if store.copies is None:
            self._write(memory)
        else:
            self.host = store.copies.take(self.size)
            self.out = store.copies.start_copy_to_host(memory, self.host)

    def _write(self, memory: Tensor) -> None:
        self.writing = self.region.file.start_write(self.region.offset, memory)
        self.region.busy.append(self.writing)

    @override
    def advance(self) -> None:
        if self.out is not None and self.host is not None:
            self.out.synchronize()
            self.out = None
            self._write(self.host)

    @override
    def finish_offload(self) -> None:
        self.advance()
        assert self.writing is not None
        self.writing.result()
        self._give_host()

    @override
    def start_fetch(self) -> None:
        if self.reading is None:
            copies = self.store.copies
            self.host = copies.take(self.size) if copies else torch.empty(self.size, dtype=torch.uint8)
            self.reading = self.region.file.start_read(self.region.offset, self.host)
            self.region.busy.append(self.reading)

    @override
    def fetch(self) -> Tensor:
        self.start_fetch()
        assert self.reading is not None and self.host is not None
        self.reading.result()
        host, copies = self.host, self.store.copies
        if copies is None:
            self.host = None  # it belongs to the caller now
            return host
        memory, copy = copies.stream.copy_to_device(host, copies.device)
        self._give_host(copy)
        return copy.deliver(memory)

    @property
    @override
    def memory(self) -> Tensor | None:
        return self.host if self.store.copies is None else None

    @override
    def release(self) -> None:
        # Pinned memory that a transfer may still use is not reused.
        self.host = None
        self.store.give(self.region, self.size)

    def _give_host(self, copy: StreamWork | None = None) -> None:
        if self.host is not None and self.store.copies is not None:
            self.store.copies.give(self.host, copy)
        self.host = None
