"""Shared memory of a node: each rank allocates some, and all ranks of the node can read and write all of it.

Each rank has one anonymous file (memfd_create(2)), and all ranks of the node map all of these files. Unused
parts take no memory. A rank gets more memory without the others, and nothing is left when the processes end,
however they do. The size of /dev/shm, which is often 64 MiB in containers, is no limit.

`fence` is a memory barrier: writes before a rank's `fence` become visible before its writes after it.
Processors with weak memory ordering need it. It is MPI_Win_sync, which orders accesses to all memory, not
only to its window. So each rank has a small window of its own, which MPI makes without other ranks and
without memory in /dev/shm.

Common memory is memory in the file of one rank, its owner, that several ranks use as the same tensor. It is
followed by a word for each user, which the user sets to 1 when it no longer uses the memory. The owner frees
the memory when all these words are 1.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import secrets
import sys
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hpctrain.host.doctor import DoctorFinding
from hpctrain.host.mpi_library import MPI

if TYPE_CHECKING:
    from hpctrain.comm.transports.node_messages import MessageBuffer

_NAME = "hpctrain"
_ADDRESS_SPACE = 1 << 45  # bytes that the files of a node may take of the 2^47 of a process
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of madvise(2), since Linux 5.14
_PROBE_BITS = 62
_FENCE_BYTES = 8  # size of the window: some MPI libraries do not make empty ones
_RESIDENT = re.compile(r"^([0-9a-f]+)-[0-9a-f]+ [^\n]*\n(?:\w+: [^\n]*\n)*?Rss: +(\d+) kB$", re.MULTILINE)


class MemoryLocation(NamedTuple):
    """Byte `offset` of the file of the rank `owner` of the world."""

    owner: int
    offset: int


class MemoryIdentity(NamedTuple):
    """Data by which other ranks of the node find the memory of a rank.

    Attributes:
        rank: The rank in the world.
        process: Its process id.
        file: Its file descriptor of the memory.
        probe: Offset in the memory of a random number, which shows that it is the right one.
        number: That number.
    """

    rank: int
    process: int
    file: int
    probe: int
    number: int


class _CommonMemory(NamedTuple):
    """Common memory that this rank uses: its size, its users, and whether it is in this rank's file."""

    bytes: int
    users: tuple[int, ...]
    is_local: bool


class NodeMemory:
    """Memory of this rank, and of the other ranks of its node. Methods are local if nothing else is said.

    Args:
        rank: This rank in the world.
        file_bytes: Length of the file of each rank.

    Attributes:
        fence: Function that orders this rank's reads and writes of the memory.
        progress: Function that lets this rank's MPI messages make progress. Ranks call it while they wait,
            since others may wait for these messages.
        reusable: Offsets of memory that `reuse` has allocated and nobody uses now, by its key.
        message_buffers: Buffers of the messages of all groups (`NodeMessages`).
        free_staging: Memory through which operations copy tensors, and which no operation uses now.
    """

    def __init__(self, rank: int, file_bytes: int) -> None:
        self.rank, self.file_bytes = rank, file_bytes
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.truncate(self._file, file_bytes)
        self._window = MPI.Win.Allocate_shared(_FENCE_BYTES, 1, comm=MPI.COMM_SELF)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self.fence = self._window.Sync
        # A probe lets MPI make progress only if it finds no message. On COMM_SELF there never is one.
        self.progress: Callable[[], object] = MPI.COMM_SELF.Iprobe
        self._maps: dict[int, mmap.mmap] = {}
        self._addresses: dict[int, int] = {}
        self._map(rank, self._file)
        self._free: list[tuple[int, int]] = [(0, file_bytes)]  # begin and end of free ranges, in order
        self._released: deque[tuple[int, int]] = deque()
        self._common: dict[int, _CommonMemory] = {}  # by address
        self._unused: deque[tuple[int, memoryview, int]] = deque()
        # Common memory that this rank owns: first byte, length, and the words of its users.
        self._owned: list[tuple[int, int, memoryview]] = []
        self.reusable: dict[tuple[object, ...], list[int]] = {}
        self.message_buffers: list[MessageBuffer] = []
        self.free_staging: list[Tensor] = []

    def identity(self) -> MemoryIdentity:
        """Write a random number into this memory, and return what other ranks pass to `open`.

        The number stays there as long as the memory exists. Each call takes another page, and earlier results
        stay valid.

        Raises:
            MemoryError: The system has no memory left.
        """
        probe, number = self.take(8), secrets.randbits(_PROBE_BITS)
        if probe is None:
            raise MemoryError("the system has no memory left")
        self.words(MemoryLocation(self.rank, probe), 1)[0] = number
        self.fence()
        return MemoryIdentity(self.rank, os.getpid(), self._file, probe, number)

    def open(self, peer: MemoryIdentity) -> None:
        """Map the memory of another rank. Call it once for each other rank of the node, not for this one.

        After an error, this object must not be used for that rank's memory.

        Raises:
            OSError: The memory cannot be opened, for example that of another container.
            ValueError: The process is another one, which has the same number in another container.
        """
        descriptor = os.open(Path("/proc", str(peer.process), "fd", str(peer.file)), os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map(peer.rank, descriptor)
        finally:
            os.close(descriptor)
        self.fence()
        if self.words(MemoryLocation(peer.rank, peer.probe), 1)[0] != peer.number:
            raise ValueError("it is the memory of another process")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return an uninitialized tensor in memory that the other ranks of the node can read and write.

        They reach it by `tensor_at`, with the location that `find` returns on this rank. The memory is kept
        as long as the tensor, or a view of it, exists on this rank.

        Args:
            shape: Shape of the tensor.
            dtype: Its type.

        Returns:
            The tensor; None if there is not enough memory.
        """
        elements = prod(shape)
        begin = self.take(elements * dtype.itemsize)
        if begin is None:
            return None
        length = _pages(elements * dtype.itemsize)
        memory = (ctypes.c_char * length).from_address(self._addresses[self.rank] + begin)
        weakref.finalize(memory, self._release, begin, length).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=elements).view(tuple(shape))

    def take(self, size: int) -> int | None:
        """Allocate whole pages of zeros in this rank's file, and return the offset of their first byte.

        They are allocated at once: a page that is missing later would end the process without a message. They
        are never freed, unless `empty`, `reuse` or `take_common` has called this.

        Args:
            size: Size of the memory in bytes.

        Returns:
            Offset in bytes, which makes a MemoryLocation for `tensor_at` and `words`; None if there is not
            enough memory.
        """
        self._collect()
        length = _pages(size)
        index = next((i for i, (begin, end) in enumerate(self._free) if end - begin >= length), None)
        if index is None:
            return None
        begin, end = self._free[index]
        self._free[index : index + 1] = [(begin + length, end)] if begin + length < end else []
        try:
            try:
                self._maps[self.rank].madvise(_POPULATE_WRITE, begin, length)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                os.posix_fallocate(self._file, begin, length)
        except OSError:
            self._release(begin, length)
            return None
        return begin

    def reuse(self, key: tuple[object, ...], size: int, user: object) -> int | None:
        """Allocate memory in this rank's file for the object `user`, as long as that exists.

        If an earlier user with this key no longer exists, its memory is returned with its contents. Otherwise
        the memory consists of zeros.

        Args:
            key: Key of users that may follow each other. All of them must pass the same `size`.
            size: Size of the memory in bytes.
            user: Object that can have weak references.

        Returns:
            Offset of the first byte; None if there is not enough memory.
        """
        free = self.reusable.setdefault(key, [])
        offset = free.pop() if free else self.take(size)
        if offset is not None:
            weakref.finalize(user, free.append, offset).atexit = False
        return offset

    def take_common(self, size: int, users: int) -> MemoryLocation | None:
        """Allocate zeros in this rank's file as common memory of `users` ranks. Only the owner calls this.

        The caller chooses which rank is the owner. The memory is freed when the tensors of all users are
        gone, and never if a user does not call `common_tensor`.

        Args:
            size: Size of the memory in bytes.
            users: Number of ranks that call `common_tensor`, with the owner if it does.

        Returns:
            Location that the owner sends to all users, each of which passes it to `common_tensor`; None if
            there is not enough memory.
        """
        length = _pages(size)
        begin = self.take(length + 8 * users)
        if begin is None:
            return None
        words = self.words(MemoryLocation(self.rank, begin + length), users)
        self._owned.append((begin, length + _pages(8 * users), words))
        return MemoryLocation(self.rank, begin)

    def common_tensor(
        self, location: MemoryLocation, elements: int, dtype: torch.dtype, users: tuple[int, ...]
    ) -> Tensor:
        """Return common memory as a flat tensor. Local; no other rank is waited for.

        This rank uses the memory as long as the tensor or a view of it exists. Values that users have written
        stay; at first they are 0. The owner may allocate the memory again when no user uses it any more.

        Args:
            location: Location that `take_common` has returned on its owner.
            elements: Length of the tensor. Its size in bytes is the `size` that was passed to `take_common`.
            dtype: Its type.
            users: Ranks of the world that use the memory, with this one among them: as many as were passed to
                `take_common`, and in the same order on all ranks. Each of them calls this once; otherwise the
                memory is never freed.
        """
        size, address = elements * dtype.itemsize, self._addresses[location.owner] + location.offset
        memory = (ctypes.c_char * size).from_address(address)
        words = self.words(MemoryLocation(location.owner, location.offset + _pages(size)), len(users))
        self._common[address] = _CommonMemory(size, users, location.owner == self.rank)
        weakref.finalize(memory, self._unused.append, (address, words, users.index(self.rank))).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=elements)

    def is_common(self, tensor: Tensor, users: tuple[int, ...]) -> bool:
        """Return True if a tensor is common memory of exactly these users, or a view of such a tensor.

        Common memory is what `common_tensor` returns: memory that several ranks use as the same tensor.

        Args:
            tensor: The tensor.
            users: Ranks of the world that use the memory, this one included, in the order in which they were
                passed to `common_tensor`. With the same ranks in another order, the result is False.
        """
        common = self._common.get(tensor.untyped_storage().data_ptr())
        return common is not None and common.users == users

    def _collect(self) -> None:
        """Mark this rank's use of dropped tensors as ended, and free memory that nobody uses any more."""
        if self._unused:
            self.fence()  # this rank's reads of the memory come before it marks it as unused
            while self._unused:
                address, words, number = self._unused.popleft()
                words[number] = 1
                del self._common[address]
        for owned in [each for each in self._owned if all(each[2])]:
            self._owned.remove(owned)
            self._release(*owned[:2])
        while self._released:
            self._add_free(*self._released.popleft())

    def _release(self, begin: int, length: int) -> None:
        """Give pages back to the system.

        The garbage collector may call this at any time in any thread. So the next `_collect` adds the range
        to the free ones.
        """
        self._maps[self.rank].madvise(mmap.MADV_REMOVE, begin, length)
        self._released.append((begin, length))

    def _add_free(self, begin: int, length: int) -> None:
        index, end = bisect_left(self._free, (begin, begin)), begin + length
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == begin:
            index -= 1
            begin = self._free.pop(index)[0]
        self._free.insert(index, (begin, end))

    def find(self, tensor: Tensor) -> MemoryLocation | None:
        """Return where a tensor begins in the memory of the node; None if it is not in that memory."""
        address = tensor.data_ptr()
        for owner, start in self._addresses.items():
            if start <= address < start + self.file_bytes:
                return MemoryLocation(owner, address - start)
        return None

    def tensor_at(self, location: MemoryLocation, elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor on the memory of any rank of the node, without a copy.

        Args:
            location: Start of the tensor. Its owner must not free the memory as long as the tensor is used.
            elements: Number of elements.
            dtype: Their type.
        """
        return torch.frombuffer(
            self._maps[location.owner], dtype=dtype, count=elements, offset=location.offset
        )

    def words(self, location: MemoryLocation, count: int) -> memoryview:
        """Return a writable view of `count` 64-bit signed integers in the memory of any rank of the node.

        Each integer is read and written atomically. `fence` orders them among other reads and writes.

        Args:
            location: Start of the integers, a multiple of 8 bytes.
            count: Number of integers.
        """
        return memoryview(self._maps[location.owner])[location.offset : location.offset + 8 * count].cast("q")

    def foreign_bytes(self) -> int:
        """Return the bytes by which the system's count of this process's resident memory is too large. Local.

        They are the pages of other ranks' files that this process has accessed. Common memory is divided
        equally among its users, whichever rank owns it: the owner counts the shares of the other users as
        theirs, and each other user subtracts its own share from the pages that it has accessed. So the result
        is negative if this process has accessed less than its share of the common memory of other ranks, as
        at first.
        """
        self._collect()
        in_common = sum(
            each.bytes * each.is_local - -(-each.bytes // len(each.users)) for each in self._common.values()
        )
        starts = {address for rank, address in self._addresses.items() if rank != self.rank}
        maps = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
        resident = _RESIDENT.findall(maps)
        return in_common + sum(1024 * int(size) for start, size in resident if int(start, 16) in starts)

    def close(self) -> None:
        """Free the MPI window, before MPI is finalized; afterwards `fence` must not be called. Local.

        Tensors in the memory stay valid.
        """
        self._window.Unlock_all()
        self._window.Free()

    def _map(self, rank: int, file: int) -> None:
        mapped = mmap.mmap(file, self.file_bytes)
        self._maps[rank] = mapped
        self._addresses[rank] = ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def open_node_memory(node: MPI.Intracomm, rank: int) -> NodeMemory | str:
    """Open this rank's memory and map that of the other ranks of its node. Collective over the node.

    Args:
        node: Communicator of the ranks of the node.
        rank: This rank in the world.

    Returns:
        The memory, which must be closed before MPI is finalized; or, on all ranks of the node, the same
        sentence that says why there is none.
    """
    if not hasattr(os, "memfd_create"):
        return f"{sys.platform} does not have memfd_create"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    file_bytes = _pages(min(max(node.allgather(total)), _ADDRESS_SPACE // node.size))
    memory = identity = None
    failure = ""
    try:
        memory = NodeMemory(rank, file_bytes)
        identity = memory.identity()
    except (OSError, ValueError, MemoryError, MPI.Exception) as error:
        failure = f"rank {rank} cannot create shared memory: {error}"
    for peer in node.allgather(identity):
        if memory is not None and peer is not None and peer.rank != rank and not failure:
            try:
                memory.open(peer)
            except (OSError, ValueError) as error:
                failure = f"rank {rank} cannot open the memory of rank {peer.rank}: {error}"
    failures: list[str] = [each for each in node.allgather(failure) if each]
    if memory is not None and not failures:
        return memory
    if memory is not None:
        memory.close()
    return failures[0]


def examine_node_memory(world: MPI.Intracomm) -> list[DoctorFinding]:
    """Return what `hpctrain doctor` prints about the memory that the ranks of this node share.

    Collective over `world`. Memory is opened for the examination, and closed again.

    Returns:
        A list with one finding, which has a remedy if memory is not shared; [] if this rank is alone on its
        node.
    """
    node = world.Split_type(MPI.COMM_TYPE_SHARED, world.rank)
    assert isinstance(node, MPI.Intracomm)
    memory = open_node_memory(node, world.rank) if node.size > 1 else None
    size = node.size
    node.Free()
    if memory is None:
        return []
    if isinstance(memory, str):
        remedy = "the ranks of a node communicate by MPI messages instead, which takes longer"
        return [DoctorFinding("memory of a node", f"not shared: {memory}", remedy)]
    memory.close()
    return [DoctorFinding("memory of a node", f"{size} ranks see each other's memory")]


def _pages(size: int) -> int:
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
