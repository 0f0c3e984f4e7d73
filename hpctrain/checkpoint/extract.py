"""Bytes from a checkpoint file into an Entry's values, read at the places the structure names."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hpctrain.checkpoint import checksum
from hpctrain.checkpoint.checksum import Sums, Words
from hpctrain.checkpoint.layout import Block, Entry, Runs, blocks, runs
from hpctrain.checkpoint.structure import Stored
from hpctrain.checkpoint.writeback import start_reading
from hpctrain.errors import InputOutputError

BUFFER_BYTES = 16 << 20
# Runs shorter than this are read together with what lies between them.
_SIEVED_BYTES = 32 << 10
_PART_BYTES = 4 << 20
# What the system is asked to read before it is needed.
_AHEAD_BYTES = 32 << 20


@dataclass(frozen=True)
class Part:
    """A rectangle of a dataset that is read at once, where it goes, and the sums it is added to."""

    entry: Entry
    stored: Stored
    sums: Sums | None
    block: Block

    @property
    def bytes(self) -> int:
        """What it takes in the file."""
        return self.block.elements * self.stored.item_bytes


@dataclass(frozen=True)
class Source:
    """An open checkpoint file; no read holds more than `buffer_bytes` besides what it fills."""

    path: Path
    descriptor: int
    buffer_bytes: int = BUFFER_BYTES

    def fill(self, entry: Entry, stored: Stored, sums: Sums | None, zero_padding: bool = True) -> None:
        """Read an Entry's values from its dataset, add them to `sums` if given.

        Padding becomes zero, or stays as it is.
        """
        self.fill_all(self.parts(entry, stored, sums, zero_padding))

    def parts(
        self, entry: Entry, stored: Stored, sums: Sums | None, zero_padding: bool = True
    ) -> Iterator[Part]:
        """What `fill` reads, in pieces that stay in the processor's cache while they are added up."""
        found = blocks(entry)
        if zero_padding and sum(block.elements for block in found) < entry.values.numel():
            entry.values.zero_()
        limit = max(1, min(self.buffer_bytes, _PART_BYTES) // stored.item_bytes)
        return (Part(entry, stored, sums, part) for block in found for part in block.cut(limit))

    def fill_all(self, parts: Iterable[Part]) -> None:
        """Read parts in order, while the system reads what comes next from the disk."""
        ahead: deque[Part] = deque()
        waiting = 0
        for part in parts:
            start_reading(self.descriptor, *part.stored.span(part.block.start, part.block.shape))
            ahead.append(part)
            waiting += part.bytes
            while waiting > _AHEAD_BYTES:
                waiting -= ahead[0].bytes
                self._fill(ahead.popleft())
        for part in ahead:
            self._fill(part)

    def _fill(self, part: Part) -> None:
        entry, stored, block = part.entry, part.stored, part.block
        with block.filling(entry.values) as view:
            direct = entry.values.device.type == "cpu" and block.contiguous
            target = view.reshape(-1) if direct else torch.empty(block.elements, dtype=view.dtype)
            words = target.numpy().view(f"u{stored.item_bytes}")
            self.read_block(words, block, stored)
            if part.sums is not None:
                checksum.add(part.sums, words, block.start, block.shape, stored.shape)
            if not direct:
                view.copy_(target.reshape(block.shape))

    def read_block(self, words: Words, block: Block, stored: Stored) -> None:
        """Fill a flat array with the elements of a rectangle of a dataset."""
        rest = words
        for group in runs(block.start, block.shape, stored.shape):
            count = group.count * group.length
            self._read_runs(rest[:count].reshape(group.count, group.length), group, stored)
            rest = rest[count:]

    def read(self, words: Words, offset: int) -> None:
        """Fill a contiguous array from the file at `offset` bytes."""
        rest = memoryview(words.reshape(-1).view(np.uint8).data)
        while rest:
            count = os.preadv(self.descriptor, [rest[: 1 << 30]], offset)
            if count == 0:
                raise InputOutputError(f"{self.path}: truncated: it ends at byte {offset}")
            rest, offset = rest[count:], offset + count

    def _read_runs(self, rows: Words, group: Runs, stored: Stored) -> None:
        size = stored.item_bytes
        offset = stored.offset + group.first * size
        if group.count == 1 or group.stride == group.length:
            self.read(rows, offset)
        elif group.length * size >= _SIEVED_BYTES or group.stride * size > self.buffer_bytes:
            for row in range(group.count):
                self.read(rows[row], offset + row * group.stride * size)
        else:
            step = max(1, self.buffer_bytes // (group.stride * size))
            for row in range(0, group.count, step):
                count = min(step, group.count - row)
                span = np.empty((count - 1) * group.stride + group.length, rows.dtype)
                self.read(span, offset + row * group.stride * size)
                rows[row : row + count] = np.lib.stride_tricks.as_strided(
                    span, (count, group.length), (group.stride * size, size), writeable=False
                )


@contextmanager
def opened(path: Path, buffer_bytes: int = BUFFER_BYTES) -> Iterator[Source]:
    """The file open for reading, without HDF5."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield Source(path, descriptor, buffer_bytes)
    finally:
        os.close(descriptor)
