"""File in the memory of a node with one rank's part of a mirror.

The file has a header, the slices after each other, and a table in JSON that describes them, with a checksum
of each. The header has a hash of the table and is written last. So a part is complete or invalid, both on the
rank that made it and on the rank that received it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import prod
from pathlib import Path
from struct import Struct
from threading import Condition
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.checkpoint import checksum
from hpctrain.checkpoint.checksum import Words
from hpctrain.checkpoint.draft import PIECE_BYTES
from hpctrain.checkpoint.tensor_ranges import STORED_AS, Index, TensorBox, TensorRange, boxes_of
from hpctrain.errors import InputOutputError
from hpctrain.files import open_regular, parse_json
from hpctrain.parallel.shards import Shard

Memory = NDArray[np.uint8]
"""Bytes of a file that is mapped into memory."""

_HEADER = Struct("<16sQQ32s")
"""Header: kind of the file, size and offset of the table in bytes, hash of the table."""

HEADER_BYTES = _HEADER.size
_KIND = b"hpctrain mirror1"
_ALIGNMENT = 64
_SPARE = 1 << 16
"""Number of bytes by which a table may grow, for example since it has the last losses."""

_DIGEST_BYTES = 32


@dataclass(frozen=True)
class MirrorSlice:
    """Box of a dataset, and its offset in the file in bytes."""

    entry: TensorRange
    box: TensorBox
    offset: int

    @property
    def bytes(self) -> int:
        """Number of bytes in the file."""
        return self.box.elements * np.dtype(STORED_AS[self.entry.kind]).itemsize

    def words(self, memory: Memory) -> Words:
        """Return the elements in the memory of the file, flat, as bits in integers."""
        size = self.entry.values.element_size()
        words: Words = memory[self.offset : self.offset + self.bytes].view(f"u{size}")
        return words

    @property
    def description(self) -> list[object]:
        """Row of the table without offset and checksum."""
        entry, box = self.entry, self.box
        return [entry.dataset, entry.kind, entry.shape, box.start, box.shape]

    def row(self, memory: Memory) -> list[object]:
        """Return the row of the table."""
        return [*self.description, self.offset, _sum(self.words(memory))]


@dataclass(frozen=True)
class SlotContents:
    """Slices of a rank's part.

    Attributes:
        slices: The slices. Those that a step changes before the update come first.
        empty: Name, dtype and shape of the datasets without elements.
        end: Offset of the table in bytes.
    """

    slices: tuple[MirrorSlice, ...]
    empty: tuple[tuple[str, str, Index], ...]
    end: int

    @staticmethod
    def of(entries: Sequence[TensorRange]) -> SlotContents:
        """Return the slices of this rank's share of its entries. Each slice has one checksum."""
        slices, offset = [], HEADER_BYTES
        for entry in sorted(entries, key=lambda each: not each.changes_in_step):
            part = entry.part(*entry.share())
            limit = max(1, min(checksum.PIECE, PIECE_BYTES // part.values.element_size()))
            for box in (cut for each in boxes_of(part) for cut in each.cut(limit)):
                slices.append(MirrorSlice(part, box, offset))
                offset += -(-slices[-1].bytes // _ALIGNMENT) * _ALIGNMENT
        empty = {(entry.dataset, entry.kind, entry.shape) for entry in entries if not prod(entry.shape)}
        return SlotContents(tuple(slices), tuple(sorted(empty)), offset)

    @property
    def changed_in_step(self) -> int:
        """Number of slices that a step changes before the update."""
        return sum(each.entry.changes_in_step for each in self.slices)

    def slot_bytes(self, state: Mapping[str, Any]) -> int:
        """Return the size of a slot for these slices and a table with a training state like this one."""
        numbers = 2 * len(str(1 << 64))
        rows = sum(len(json.dumps(each.description)) + numbers for each in self.slices)
        names = sum(len(json.dumps(each)) for each in self.empty)
        return self.end + rows + names + len(json.dumps(state)) + _SPARE


class MirrorSlot:
    """File in the memory of a node for a part, mapped by the rank that fills it.

    Args:
        path: The file, which is created.
        size: Its size in bytes.

    Raises:
        OSError: The node has too little memory.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            # All memory is allocated at once: a later write to missing memory would kill the process.
            os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)
        self.memory: Memory = np.asarray(np.memmap(path, np.uint8, "r+", shape=(size,)))

    def invalidate(self) -> None:
        """Make the part in this slot invalid."""
        self.memory[:HEADER_BYTES] = 0

    def write_table(self, table: Mapping[str, Any], contents: SlotContents) -> Memory:
        """Write the table after the slices are copied, and return the header that makes the part valid.

        Args:
            table: Keys of the table other than the slices.
            contents: The slices.

        Raises:
            InputOutputError: The table is too long for the slot.
        """
        rows = [each.row(self.memory) for each in contents.slices]
        text = json.dumps({**table, "slices": rows, "empty": contents.empty}).encode()
        end = contents.end + len(text)
        if end > len(self.memory):
            raise InputOutputError(
                f"{self.path}: the table of the mirror is {end - len(self.memory)} bytes too long for this "
                "file; set checkpoint.mirror = false"
            )
        self.memory[contents.end : end] = np.frombuffer(text, np.uint8)
        header = _HEADER.pack(_KIND, len(text), contents.end, _digest(text))
        return np.array(bytearray(header), np.uint8)

    def mark_complete(self, header: Memory) -> None:
        """Write the header, which makes the part valid."""
        self.memory[:HEADER_BYTES] = header


class SlotCopy:
    """Copy-on-write of slices into the memory of a file.

    A thread copies one slice after another. The training thread copies those that a step or an update is
    about to change.

    Args:
        contents: The slices.
        memory: Memory of the file.
    """

    def __init__(self, contents: SlotContents, memory: Memory) -> None:
        self._contents, self._memory = contents, memory
        self._changing_in_step = contents.changed_in_step
        self._next = 0
        self._copying: set[int] = set()
        self._changed = Condition()

    def run(self) -> None:
        """Copy slices until all are copied. The thread calls this."""
        self._copy(len(self._contents.slices))

    def protect(self, update: bool = True) -> None:
        """Copy slices that are not copied yet, so that the values may change. The training thread calls this.

        Args:
            update: True before an update, which changes all values. False before a step, which changes only
                those with `changes_in_step`.
        """
        self._copy(len(self._contents.slices) if update else self._changing_in_step)

    def _copy(self, last: int) -> None:
        """Copy the slices before number `last`, and wait for those that the other thread copies."""
        for number in self._claim(last):
            part = self._contents.slices[number]
            values = part.box.load(part.entry.values).contiguous().cpu().numpy().reshape(-1)
            np.copyto(part.words(self._memory), values.view(f"u{values.itemsize}"))
        with self._changed:
            self._changed.wait_for(lambda: all(number >= last for number in self._copying))

    def _claim(self, last: int) -> Iterator[int]:
        """Yield numbers of slices that the other thread does not copy. Each is copied before the next one."""
        while True:
            with self._changed:
                if self._next >= last:
                    return
                number = self._next
                self._next += 1
                self._copying.add(number)
            try:
                yield number
            finally:
                with self._changed:
                    self._copying.discard(number)
                    self._changed.notify_all()


@dataclass(frozen=True)
class MirrorPart:
    """Part of a mirror that was found.

    Attributes:
        path: The file.
        run: Token of the start that made it.
        generation: Number of the mirror in this start.
        step: Step of the mirror.
        rank: Rank that made it.
        ranks: Number of ranks of the run.
        host: Name of the node of this rank.
        state: Training state; None in parts of ranks other than 0.
        rows: Slices: dataset, dtype and shape of the dataset, start and shape of the box, offset, checksum.
        empty: Name, dtype and shape of datasets without elements.
    """

    path: Path
    run: str
    generation: int
    step: int
    rank: int
    ranks: int
    host: str
    state: dict[str, Any] | None
    rows: list[tuple[str, str, Index, Index, Index, int, int]] = field(repr=False)
    empty: list[tuple[str, str, Index]] = field(repr=False)

    def entries(self) -> list[TensorRange]:
        """Return the slices as TensorRanges whose values are in the memory of the file.

        Raises:
            InputOutputError: A slice differs from its checksum, or the file cannot be read.
        """
        memory = _mapped(self.path)
        entries = [
            TensorRange(
                dataset, Shard(dataset, shape, (0,) * len(shape), shape), torch.empty(0, dtype=_type(kind))
            )
            for dataset, kind, shape in self.empty
        ]
        for dataset, kind, shape, start, size, offset, expected in self.rows:
            dtype = _type(kind)
            length = prod(size) * dtype.itemsize
            content = memory[offset : offset + length]
            if len(content) < length or _sum(content.view(f"u{dtype.itemsize}")) != expected:
                raise InputOutputError(f"{self.path}: {dataset} differs from its checksum")
            values = torch.from_numpy(content).view(dtype)
            entries.append(TensorRange(dataset, Shard(dataset, shape, start, size), values))
        return entries


def read_part(path: Path) -> MirrorPart | None:
    """Return the part in a file; None if the file has no complete one.

    Raises:
        InputOutputError: The table differs from its hash, or the file cannot be read.
    """
    memory = _mapped(path)
    if len(memory) < HEADER_BYTES or not memory[:HEADER_BYTES].any():
        return None
    kind, size, begin, digest = _HEADER.unpack(memory[:HEADER_BYTES].tobytes())
    text = memory[begin : begin + size].tobytes() if begin <= len(memory) else b""
    if kind != _KIND or len(text) != size or _digest(text) != digest:
        raise InputOutputError(f"{path}: its table differs from its checksum")
    table = parse_json(text)
    rows = [
        (name, dtype, tuple(shape), tuple(start), tuple(extent), offset, total)
        for name, dtype, shape, start, extent, offset, total in table.pop("slices")
    ]
    empty = [(name, dtype, tuple(shape)) for name, dtype, shape in table.pop("empty")]
    return MirrorPart(path, rows=rows, empty=empty, **table)


def _mapped(path: Path) -> Memory:
    """Return a file of this user, mapped copy-on-write."""
    try:
        with open_regular(path) as stream:
            if os.fstat(stream.fileno()).st_uid != os.getuid():
                raise PermissionError(f"{path} belongs to another user")
            return np.asarray(np.memmap(stream, np.uint8, "c"))
    except (OSError, ValueError) as error:  # a file without bytes is a ValueError
        raise InputOutputError(f"{path}: cannot be read: {error}") from None


def _type(kind: str) -> torch.dtype:
    dtype = getattr(torch, kind)
    assert isinstance(dtype, torch.dtype), kind
    return dtype


def _sum(words: Words) -> int:
    """Return the checksum of a slice."""
    sums = np.zeros(1, np.uint64)
    if words.size:
        checksum.add(sums, words, (0,), (words.size,), (words.size,))
    return int(sums[0])


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=_DIGEST_BYTES).digest()
