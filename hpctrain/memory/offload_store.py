"""Where bytes wait outside of the device's memory: in pinned host memory, or in a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict

import torch
from torch import Tensor

from hpctrain.host.device import SideStream, StreamWork, empty_host_tensor, on_host
from hpctrain.memory.scratch import ScratchFile, ScratchFiles, Transfer


class OffloadHandle(ABC):
    """One tensor's stay on a Shelf, from its putting there until `release`."""

    @abstractmethod
    def advance(self) -> None:
        """Go on with the way there, as far as goes without much waiting."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until it is there; the memory it came from may go."""

    @abstractmethod
    def start_fetch(self) -> None:
        """Start to bring it back, after `settle`; nothing where that is under way."""

    @abstractmethod
    def fetch(self) -> Tensor:
        """The bytes, back on their device."""

    @property
    def memory(self) -> Tensor | None:
        """Memory of the device into which the bytes are coming back, if there is such."""
        return None

    @abstractmethod
    def release(self) -> None:
        """Give up its place. Never waits, never fails."""


class DeviceCopies:
    """Copies between a GPU and pinned host memory, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = SideStream()
        self._free: defaultdict[int, list[tuple[Tensor, StreamWork | None]]] = defaultdict(list)

    def take(self, size: int) -> Tensor:
        """Return pinned memory of `size` bytes, to be given back.

        Wait on the host for the copy that still reads it, if `give` has named one.
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

    def start_out(self, memory: Tensor, host: Tensor) -> StreamWork:
        """Start to copy to the host."""
        return self.stream.start(lambda: host.copy_(memory, non_blocking=True), [memory])


class HostOffloadStore(DeviceCopies):
    """Pinned memory of a GPU's host, for flat tensors of bytes [n] uint8."""

    def put(self, memory: Tensor) -> OffloadHandle:
        """Start to take a tensor in, which must not be changed any more."""
        return _HostHandle(self, memory)


class _HostHandle(OffloadHandle):
    def __init__(self, copies: DeviceCopies, memory: Tensor) -> None:
        self.copies = copies
        self.host = copies.take(memory.numel())
        self.out = copies.start_out(memory, self.host)
        self.coming: tuple[Tensor, StreamWork] | None = None

    def advance(self) -> None:
        pass

    def settle(self) -> None:
        self.out.synchronize()

    def start_fetch(self) -> None:
        if self.coming is None:
            self.coming = self.copies.stream.copy_to_device(self.host, self.copies.device)

    def fetch(self) -> Tensor:
        self.start_fetch()
        assert self.coming is not None
        memory, copy = self.coming
        return copy.deliver(memory)

    def release(self) -> None:
        self.copies.give(self.host)


class Region:
    """A piece of a file; `busy` are transfers that may not have ended."""

    def __init__(self, file: ScratchFile, offset: int) -> None:
        self.file, self.offset = file, offset
        self.busy: list[Transfer] = []


class DiskOffloadStore:
    """Files of a ScratchFiles: one of `capacity` bytes at once, further ones where that does not do."""

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
        """Store a tensor, and return the handle by which it is read again."""
        return _DiskHandle(self, memory)

    def take(self, size: int) -> Region:
        """A free piece of a file. InputOutputError where the disk is full, or a transfer there failed."""
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
        """Give a piece back, maybe before its last transfer has ended."""
        self._free[size].append(region)

    def _grow(self, size: int) -> None:
        self._files.append(self.scratch.file(f"activations-{len(self._files)}", size))
        self._end = 0


Shelf = HostOffloadStore | DiskOffloadStore


class _DiskHandle(OffloadHandle):
    """Bytes in a file; those of a GPU go there, and come back, by pinned host memory."""

    def __init__(self, shelf: DiskOffloadStore, memory: Tensor) -> None:
        self.shelf, self.size = shelf, memory.numel()
        self.region = shelf.take(self.size)
        self.host: Tensor | None = None
        self.out: StreamWork | None = None
        self.writing: Transfer | None = None
        self.reading: Transfer | None = None
        if shelf.copies is None:
            self._write(memory)
        else:
            self.host = shelf.copies.take(self.size)
            self.out = shelf.copies.start_out(memory, self.host)

    def _write(self, memory: Tensor) -> None:
        self.writing = self.region.file.start_write(self.region.offset, memory)
        self.region.busy.append(self.writing)

    def advance(self) -> None:
        if self.out is not None and self.host is not None:
            self.out.synchronize()
            self.out = None
            self._write(self.host)

    def settle(self) -> None:
        self.advance()
        assert self.writing is not None
        self.writing.result()
        self._give_host()

    def start_fetch(self) -> None:
        if self.reading is None:
            copies = self.shelf.copies
            self.host = copies.take(self.size) if copies else torch.empty(self.size, dtype=torch.uint8)
            self.reading = self.region.file.start_read(self.region.offset, self.host)
            self.region.busy.append(self.reading)

    def fetch(self) -> Tensor:
        self.start_fetch()
        assert self.reading is not None and self.host is not None
        self.reading.result()
        host, copies = self.host, self.shelf.copies
        if copies is None:
            self.host = None  # from now on the caller's
            return host
        memory, copy = copies.stream.copy_to_device(host, copies.device)
        self._give_host(copy)
        return copy.deliver(memory)

    @property
    def memory(self) -> Tensor | None:
        return self.host if self.shelf.copies is None else None

    def release(self) -> None:
        # Pinned memory that a transfer may still use is not given to others.
        self.host = None
        self.shelf.give(self.region, self.size)

    def _give_host(self, copy: StreamWork | None = None) -> None:
        if self.host is not None and self.shelf.copies is not None:
            self.shelf.copies.give(self.host, copy)
        self.host = None
