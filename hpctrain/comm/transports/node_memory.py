"""Memory of one rank that the other ranks of its node see, and read and write where it lies.

Each rank keeps one file that has no name (memfd_create(2)), and all of them map each other's as a whole: what
is not used takes no memory. Nothing is left when the ranks end, however they do; no rank needs the others to
get more; and what /dev/shm has room for, which in containers often is 64 MiB, is no limit.

What one rank writes is seen by another one in the order of their `fence`s: that of MPI-3 shared windows
(MPI_Win_sync), a barrier of all loads and stores of the processor, which weakly ordered ones need. It is one
of the processor and of no certain memory: so each rank has a window of itself alone, which MPI makes without
a word to others and, unlike one of several ranks, without room in /dev/shm.

Memory in common is a place in the file of one rank that several use as theirs. Its owner takes it back when
all have written down, behind it, that they use it no more.
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
_ADDRESSES = 1 << 45  # of those that a process has, 2^47, what the files of a node may take together
_POPULATE_WRITE = 23  # of madvise(2), from Linux 5.14 on
_PROBE_BITS = 62
_FENCE_BYTES = 8  # of the window that is there for its fence: some libraries make none of no bytes
_RESIDENT = re.compile(r"^([0-9a-f]+)-[0-9a-f]+ [^\n]*\n(?:\w+: [^\n]*\n)*?Rss: +(\d+) kB$", re.MULTILINE)


class MemoryLocation(NamedTuple):
    """A byte of the file of a rank of the world."""

    owner: int
    offset: int


class _Common(NamedTuple):
    """Memory in common that this rank uses: its bytes, the ranks that do, and whether it is this one's."""

    bytes: int
    users: tuple[int, ...]
    own: bool


class NodeMemory:
    """That of this rank, `rank` of the world, and of its peers, the ranks of its node.

    `room` is the length of each one's file.
    """

    def __init__(self, rank: int, room: int) -> None:
        self.rank, self.room = rank, room
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.truncate(self._file, room)
        self._window = MPI.Win.Allocate_shared(_FENCE_BYTES, 1, comm=MPI.COMM_SELF)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self.fence = self._window.Sync
        # Of one's own, from whom nothing comes: where MPI has something at hand, it helps nothing along.
        self.progress: Callable[[], object] = MPI.COMM_SELF.Iprobe
        """Helps this rank's messages along: those who are waited for here may wait for these."""
        self._maps: dict[int, mmap.mmap] = {}
        self._addresses: dict[int, int] = {}
        self._map(rank, self._file)
        self._free: list[tuple[int, int]] = [(0, room)]  # where free bytes begin and end, in their order
        self._released: deque[tuple[int, int]] = deque()
        self._common: dict[int, _Common] = {}  # by address
        self._left: deque[tuple[int, memoryview, int]] = deque()
        self._lent: list[tuple[int, int, memoryview]] = []  # first byte, length, who uses it no more
        self.boards: dict[int, list[tuple[int, int]]] = {}
        """Boards that groups have left behind, by their length: see `Boards`."""
        self.inline: dict[tuple[int, ...], list[int]] = {}
        """The same by the ranks of such groups: see `open_inline`."""
        self.blocks: list[MessageBuffer] = []
        """What messages lie in, whatever group they are of, see `Messages`."""
        self.staging: list[Tensor] = []
        """Memory that operations copy through, and none uses now."""

    @property
    def peers(self) -> frozenset[int]:
        """The ranks of the world whose memory this one sees, itself among them."""
        return frozenset(self._maps)

    def told(self) -> tuple[int, int, int]:
        """This rank, its process and its file, for `open` on the others."""
        return self.rank, os.getpid(), self._file

    def open(self, rank: int, process: int, file: int) -> None:
        """See the memory of a rank that is the process of this number, and has it open as this file.

        OSError where that cannot be, such as of another container.
        """
        own = os.open(Path("/proc", str(process), "fd", str(file)), os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map(rank, own)
        finally:
            os.close(own)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Uninitialized memory that the peers see, for as long as the tensor lives; None where the system has
        no more.
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
        """Where so many bytes begin that are this rank's for good, zero; None where the system has no more.

        They are there at once: a page that cannot be had later would end the process without a word.
        """
        self._settle()
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

    def lend(self, size: int, users: int) -> MemoryLocation | None:
        """Take so many bytes, zero, for `common` on so many ranks; None where the system has no more."""
        length = _pages(size)
        begin = self.take(length + 8 * users)
        if begin is None:
            return None
        words = self.words(MemoryLocation(self.rank, begin + length), users)
        self._lent.append((begin, length + _pages(8 * users), words))
        return MemoryLocation(self.rank, begin)

    def common(
        self, place: MemoryLocation, elements: int, dtype: torch.dtype, users: tuple[int, ...]
    ) -> Tensor:
        """What a rank has lent, as it lies: in use for as long as the tensor lives. All `users`, ranks of the
        world, call this.
        """
        size, address = elements * dtype.itemsize, self._addresses[place.owner] + place.offset
        memory = (ctypes.c_char * size).from_address(address)
        words = self.words(MemoryLocation(place.owner, place.offset + _pages(size)), len(users))
        self._common[address] = _Common(size, users, place.owner == self.rank)
        weakref.finalize(memory, self._left.append, (address, words, users.index(self.rank))).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=elements)

    def is_common(self, tensor: Tensor, users: tuple[int, ...]) -> bool:
        """Whether a tensor is a piece of what `common` gave these users."""
        known = self._common.get(tensor.untyped_storage().data_ptr())
        return known is not None and known.users == users

    def _settle(self) -> None:
        """Bring the accounts up to what is no more in use."""
        if self._left:
            self.fence()  # what was read there has been read
            while self._left:
                address, words, number = self._left.popleft()
                words[number] = 1
                del self._common[address]
        for lent in [each for each in self._lent if all(each[2])]:
            self._lent.remove(lent)
            self._release(*lent[:2])
        while self._released:
            self._give(*self._released.popleft())

    def _release(self, begin: int, length: int) -> None:
        """Give pages back to the system. Whenever garbage is collected, in whatever thread: the next `take`
        alone keeps the accounts.
        """
        self._maps[self.rank].madvise(mmap.MADV_REMOVE, begin, length)
        self._released.append((begin, length))

    def _give(self, begin: int, length: int) -> None:
        index, end = bisect_left(self._free, (begin, begin)), begin + length
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == begin:
            index -= 1
            begin = self._free.pop(index)[0]
        self._free.insert(index, (begin, end))

    def find(self, tensor: Tensor) -> MemoryLocation | None:
        """Where the first element of a tensor lies, in the memory of whatever rank; None elsewhere."""
        address = tensor.data_ptr()
        for owner, start in self._addresses.items():
            if start <= address < start + self.room:
                return MemoryLocation(owner, address - start)
        return None

    def at(self, place: MemoryLocation, elements: int, dtype: torch.dtype) -> Tensor:
        """So many elements that lie there, flat: a view of memory that its owner has to keep."""
        return torch.frombuffer(self._maps[place.owner], dtype=dtype, count=elements, offset=place.offset)

    def words(self, place: MemoryLocation, count: int) -> memoryview:
        """So many numbers of 64 bits there, each of which is read and written at once."""
        return memoryview(self._maps[place.owner])[place.offset : place.offset + 8 * count].cast("q")

    def foreign_bytes(self) -> int:
        """What counts as resident in this process and is not its own: of the peers' memory what was used
        here; of memory in common, whoever owns it, all but its part, one of as many as ranks use it.
        """
        self._settle()
        beside = sum(
            each.bytes * each.own - -(-each.bytes // len(each.users)) for each in self._common.values()
        )
        starts = {address for rank, address in self._addresses.items() if rank != self.rank}
        maps = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
        found = _RESIDENT.findall(maps)
        return beside + sum(1024 * int(size) for start, size in found if int(start, 16) in starts)

    def close(self) -> None:
        """Before MPI ends; whoever holds tensors may keep them."""
        self._window.Unlock_all()
        self._window.Free()

    def _map(self, rank: int, file: int) -> None:
        mapped = mmap.mmap(file, self.room)
        self._maps[rank] = mapped
        self._addresses[rank] = ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def open_node_memory(node: MPI.Intracomm, rank: int) -> NodeMemory | str:
    """The memory that the ranks of a node share, of this rank of the world, or why there is none: the same on
    all of them. Collective over them.
    """
    if not hasattr(os, "memfd_create"):
        return f"{sys.platform} has no memory without a name"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    room = _pages(min(max(node.allgather(total)), _ADDRESSES // node.size))
    memory, failure = None, ""
    try:
        memory = NodeMemory(rank, room)
    except (OSError, ValueError, MPI.Exception) as error:
        failure = f"rank {rank} gets no memory to share: {error}"
    told = node.allgather(None if memory is None else memory.told())
    if memory is not None:
        failure = _opened(memory, [each for each in told if each is not None])
    failures: list[str] = [each for each in node.allgather(failure) if each]
    if memory is not None and not failures:
        probe, number = memory.take(8), secrets.randbits(_PROBE_BITS)
        if probe is not None:
            memory.words(MemoryLocation(rank, probe), 1)[0] = number
        memory.fence()
        probes = node.allgather((probe, number))
        memory.fence()
        failures = [each for each in node.allgather(_unseen(memory, told, probes)) if each]
    if memory is None or failures:
        if memory is not None:
            memory.close()
        return failures[0]
    return memory


def examine_node_memory(world: MPI.Intracomm) -> list[DoctorFinding]:
    """Return what `hpctrain doctor` prints about the memory that the ranks of this node share.

    Collective over `world`.

    Returns:
        One finding; none if this rank is alone on its node.
    """
    node = world.Split_type(MPI.COMM_TYPE_SHARED, world.rank)
    assert isinstance(node, MPI.Intracomm)
    memory = open_node_memory(node, world.rank) if node.size > 1 else None
    size = node.size
    node.Free()
    if memory is None:
        return []
    if isinstance(memory, str):
        remedy = "ranks of a node send each other messages instead, which takes longer"
        return [DoctorFinding("memory of a node", f"not shared: {memory}", remedy)]
    memory.close()
    return [DoctorFinding("memory of a node", f"{size} ranks see each other's")]


def _pages(size: int) -> int:
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE


def _opened(memory: NodeMemory, told: Sequence[tuple[int, int, int]]) -> str:
    """Open the memory of all; why that cannot be."""
    for rank, process, file in told:
        try:
            if rank != memory.rank:
                memory.open(rank, process, file)
        except (OSError, ValueError) as error:
            return f"rank {memory.rank} cannot open the memory of rank {rank}: {error}"
    return ""


def _unseen(
    memory: NodeMemory,
    told: Sequence[tuple[int, int, int] | None],
    probes: Sequence[tuple[int | None, int]],
) -> str:
    """Whose number, which is like no other one's, is not seen in its memory, if any: here the number of its
    process may be that of another one, which has such memory, too, for another job.
    """
    for ours, (probe, number) in zip(told, probes, strict=True):
        assert ours is not None
        if probe is None:
            return f"rank {ours[0]} gets no memory to share"
        if memory.words(MemoryLocation(ours[0], probe), 1)[0] != number:
            return f"rank {memory.rank} does not see the memory of rank {ours[0]}"
    return ""
