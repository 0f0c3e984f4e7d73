"""Bytes from a checkpoint file into an Entry's values, read at the places the structure names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.checkpoint import checksum
from hpctrain.checkpoint.checksum import Sums, Words
from hpctrain.checkpoint.layout import Entry, Rectangle, Runs, rectangles_of, runs
from hpctrain.checkpoint.structure import StoredTensor
from hpctrain.comm.device import on_host
from hpctrain.errors import InputOutputError

BUFFER_BYTES = 16 << 20
# Runs shorter than this are read together with what lies between them.
_SIEVED_BYTES = 32 << 10
_PART_BYTES = 4 << 20


@dataclass(frozen=True)
class TensorSource:
    """An open checkpoint file; no read holds more than `buffer_bytes` besides what it fills."""

    path: Path
    descriptor: int
    buffer_bytes: int = BUFFER_BYTES

    def fill(self, entry: Entry, stored: StoredTensor, sums: Sums | None, zero_padding: bool = True) -> None:
        """Read an Entry's values from its dataset, add them to `sums` if given.

        Padding becomes zero, or stays as it is.
        """
        rectangles = rectangles_of(entry)
        read = sum(rectangle.elements for rectangle in rectangles)
        if zero_padding and not entry.added and read < entry.values.numel():
            entry.values.zero_()
        # What is read at once stays in the processor's cache while it is added up.
        limit = max(1, min(self.buffer_bytes, _PART_BYTES) // stored.item_bytes)
        for rectangle in rectangles:
            for part in rectangle.cut(limit):
                self._fill(entry, stored, part, sums)

    def _fill(self, entry: Entry, stored: StoredTensor, rectangle: Rectangle, sums: Sums | None) -> None:
        with rectangle.filling(entry.values) as view:
            direct = on_host(entry.values.device) and view.is_contiguous() and not entry.added
            target = view.reshape(-1) if direct else torch.empty(rectangle.elements, dtype=view.dtype)
            words = target.numpy().view(f"u{stored.item_bytes}")
            self.read_rectangle(words, rectangle, stored)
            if sums is not None:
                checksum.add(sums, words, rectangle.start, rectangle.shape, stored.shape)
            target = target.reshape(rectangle.shape)
            if entry.added:
                view.view(entry.values.dtype).add_(target.view(entry.values.dtype).to(view.device))
            elif not direct:
                view.copy_(target)

    def read_rectangle(self, words: Words, rectangle: Rectangle, stored: StoredTensor) -> None:
        """Fill a flat array with the elements of a rectangle of a dataset."""
        rest = words
        for group in runs(rectangle.start, rectangle.shape, stored.shape):
            count = group.count * group.length
            self._read_runs(rest[:count].reshape(group.count, group.length), group, stored)
            rest = rest[count:]

    def read_elements(self, stored: StoredTensor, first: int, count: int, buffer: NDArray[np.uint8]) -> Words:
        """Elements [count] of a flattened dataset from `first` on, in the memory of `buffer`."""
        words: Words = buffer[: count * stored.item_bytes].view(f"u{stored.item_bytes}")
        self.read(words, stored.offset + first * stored.item_bytes)
        return words

    def read(self, words: Words, offset: int) -> None:
        """Fill a contiguous array from the file at `offset` bytes; InputOutputError where it cannot be."""
        rest = memoryview(words.reshape(-1).view(np.uint8).data)
        while rest:
            try:
                count = os.preadv(self.descriptor, [rest[: 1 << 30]], offset)
            except OSError as error:
                why = f"cannot be read at byte {offset}: {error.strerror or error}"
                raise InputOutputError(f"{self.path}: {why}") from None
            if count == 0:
                raise InputOutputError(f"{self.path}: truncated: it ends at byte {offset}")
            rest, offset = rest[count:], offset + count

    def _read_runs(self, rows: Words, group: Runs, stored: StoredTensor) -> None:
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
def opened(path: Path, buffer_bytes: int = BUFFER_BYTES) -> Iterator[TensorSource]:
    """The file open for reading, without HDF5."""
    descriptor = os.open(path, os.O_RDONLY)
    if hasattr(os, "posix_fadvise"):
        # The system reads ahead, farther than usual. Asked by POSIX_FADV_WILLNEED it would do so in small
        # pages, which take it twice the time.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    try:
        yield TensorSource(path, descriptor, buffer_bytes)
    finally:
        os.close(descriptor)
