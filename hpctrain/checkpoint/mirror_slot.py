"""One rank's part of a mirror: what it would write into a checkpoint, in a file of a node's memory.

The file holds a header, the slices one behind the other, and a table (JSON) that tells what they are, with a
checksum of each; the header has that of the table and is written last. So a part is whole or not there, on
the rank that made it as on the one that it was sent to.
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

_HEADER = Struct("<16sQQ32s")  # what it is, bytes of the table, where that begins, its hash
HEADER_BYTES = _HEADER.size
_KIND = b"hpctrain mirror1"
_ALIGNMENT = 64
_SPARE = 1 << 16  # bytes by which a table may grow: the last losses are in it, and numbers of steps
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class MirrorSlice:
    """A box of a dataset, which lies at `offset` of the file."""

    entry: TensorRange
    box: TensorBox
    offset: int

    @property
    def bytes(self) -> int:
        """What it takes."""
        return self.box.elements * np.dtype(STORED_AS[self.entry.kind]).itemsize

    def words(self, memory: Memory) -> Words:
        """Its place in the memory of the file, flat, the elements' bits as integers."""
        size = self.entry.values.element_size()
        words: Words = memory[self.offset : self.offset + self.bytes].view(f"u{size}")
        return words

    @property
    def described(self) -> list[object]:
        """What a table tells of it, before its place in the file and its checksum."""
        entry, box = self.entry, self.box
        return [entry.dataset, entry.kind, entry.shape, box.start, box.shape]

    def row(self, memory: Memory) -> list[object]:
        """What a table tells of it."""
        return [*self.described, self.offset, _sum(self.words(memory))]


@dataclass(frozen=True)
class SlotContents:
    """The slices of a rank, first those that a step changes before the update, and the datasets that have no
    elements; `end` is where a table may begin.
    """

    slices: tuple[MirrorSlice, ...]
    empty: tuple[tuple[str, str, Index], ...]
    end: int

    @staticmethod
    def of(entries: Sequence[TensorRange]) -> SlotContents:
        """What this rank writes of its entries, in slices of at most a checksum's elements."""
        slices, offset = [], HEADER_BYTES
        for entry in sorted(entries, key=lambda each: not each.changes_in_step):
            part = entry.part(*entry.share())
            limit = max(1, min(checksum.PIECE, PIECE_BYTES // part.values.element_size()))
            for box in (cut for whole in boxes_of(part) for cut in whole.cut(limit)):
                slices.append(MirrorSlice(part, box, offset))
                offset += -(-slices[-1].bytes // _ALIGNMENT) * _ALIGNMENT
        empty = {(entry.dataset, entry.kind, entry.shape) for entry in entries if not prod(entry.shape)}
        return SlotContents(tuple(slices), tuple(sorted(empty)), offset)

    @property
    def changed_in_step(self) -> int:
        """How many of the slices a step changes before the update."""
        return sum(each.entry.changes_in_step for each in self.slices)

    def room(self, told: Mapping[str, Any]) -> int:
        """Bytes of a file for these slices and a table that tells so much besides."""
        numbers = 2 * len(str(1 << 64))
        rows = sum(len(json.dumps(each.described)) + numbers for each in self.slices)
        names = sum(len(json.dumps(each)) for each in self.empty)
        return self.end + rows + names + len(json.dumps(told)) + _SPARE


class MirrorSlot:
    """A file in a node's memory that has room for a part, mapped by the rank that fills it."""

    def __init__(self, path: Path, size: int) -> None:
        """OSError where the node has no room for it."""
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            # All of it now: memory that is not there when it is written to would end the process.
            os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)
        self.memory: Memory = np.asarray(np.memmap(path, np.uint8, "r+", shape=(size,)))

    def empty(self) -> None:
        """What it holds counts no more."""
        self.memory[:HEADER_BYTES] = 0

    def fill(self, table: Mapping[str, Any], contents: SlotContents) -> Memory:
        """Write the table behind the slices, which are there; the header that will make the part count.

        InputOutputError where the table has grown beyond the room for it.
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

    def count(self, header: Memory) -> None:
        """All is there: from now on the part counts."""
        self.memory[:HEADER_BYTES] = header


class SlotCopy:
    """Slices on their way into the memory of a file: a thread takes one after the other, and so does who
    trains where a step or an update is about to change what is not copied yet.
    """

    def __init__(self, contents: SlotContents, memory: Memory) -> None:
        self._contents, self._memory = contents, memory
        self._of_step = contents.changed_in_step
        self._next = 0
        self._copying: set[int] = set()
        self._changed = Condition()

    def run(self) -> None:
        """Copy what nobody has begun to, and return when all is copied. For the thread."""
        self._copy(len(self._contents.slices))

    def protect(self, update: bool = True) -> None:
        """After this the values may be overwritten, without `update` only those that a step changes before.

        For who trains: before the update, and without `update` before each step.
        """
        self._copy(len(self._contents.slices) if update else self._of_step)

    def _copy(self, last: int) -> None:
        for number in self._taken(last):
            part = self._contents.slices[number]
            values = part.box.load(part.entry.values).contiguous().cpu().numpy().reshape(-1)
            np.copyto(part.words(self._memory), values.view(f"u{values.itemsize}"))
        with self._changed:
            self._changed.wait_for(lambda: all(number >= last for number in self._copying))

    def _taken(self, last: int) -> Iterator[int]:
        """Numbers that nobody else has begun with, each until it is copied."""
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
    """A part that was found: of which rank of how many, the how many-th of the start `run`, and its table."""

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
        """Its slices where they lie, each as an TensorRange that no other rank has a copy of.

        InputOutputError where one of them differs from its checksum, or cannot be read.
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
    """What a file tells that it holds; None where no part was completed in it.

    InputOutputError where the table differs from its checksum, or the file cannot be read.
    """
    memory = _mapped(path)
    if len(memory) < HEADER_BYTES or not memory[:HEADER_BYTES].any():
        return None
    what, size, begin, digest = _HEADER.unpack(memory[:HEADER_BYTES].tobytes())
    text = memory[begin : begin + size].tobytes() if begin <= len(memory) else b""
    if what != _KIND or len(text) != size or _digest(text) != digest:
        raise InputOutputError(f"{path}: its table differs from its checksum")
    table = parse_json(text)
    rows = [
        (name, kind, tuple(shape), tuple(start), tuple(held), offset, summed)
        for name, kind, shape, start, held, offset, summed in table.pop("slices")
    ]
    empty = [(name, kind, tuple(shape)) for name, kind, shape in table.pop("empty")]
    return MirrorPart(path, rows=rows, empty=empty, **table)


def _mapped(path: Path) -> Memory:
    """All of a file of ours, in pages of this process alone as soon as it writes to them."""
    try:
        with open_regular(path) as stream:
            if os.fstat(stream.fileno()).st_uid != os.getuid():
                raise PermissionError(f"{path} belongs to another user")
            return np.asarray(np.memmap(stream, np.uint8, "c"))
    except (OSError, ValueError) as error:  # no bytes at all: a ValueError
        raise InputOutputError(f"{path}: cannot be read: {error}") from None


def _type(kind: str) -> torch.dtype:
    dtype = getattr(torch, kind)
    assert isinstance(dtype, torch.dtype), kind
    return dtype


def _sum(words: Words) -> int:
    """The checksum of a slice, of at most a checksum's elements."""
    sums = np.zeros(1, np.uint64)
    if words.size:
        checksum.add(sums, words, (0,), (words.size,), (words.size,))
    return int(sums[0])


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=_DIGEST_BYTES).digest()
