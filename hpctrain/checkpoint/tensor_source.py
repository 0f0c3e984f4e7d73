"""Bytes from a checkpoint file into Entries' values, read at the places the structure names.

Two threads wait for the disk and put what they read where it belongs, while the one that asked adds up the
checksums of what has come, piece by piece and in order: neither the disk nor the processor waits.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.checkpoint import checksum
from hpctrain.checkpoint.checkpoint_index import StoredTensor
from hpctrain.checkpoint.checksum import Sums, Words
from hpctrain.checkpoint.tensor_ranges import FlatRuns, TensorBox, TensorRange, boxes_of, flat_runs
from hpctrain.errors import InputOutputError
from hpctrain.host.device import on_host

BUFFER_BYTES = 16 << 20
# FlatRuns shorter than this are read together with what lies between them.
_SIEVED_BYTES = 32 << 10
# Read and added up at a time: what has come is still in the cache, and a piece costs more than its hand-over.
_PIECE_BYTES = 1 << 20
# Reads under way at once: while one is copied out of the page cache, the other waits for the disk.
_READS = 2
# Half of the buffer is for batches, of less than two pieces each, that are read or added up; half is for what
# lies between short runs, of each read.
_PIECES_A_BUFFER, _SPANS_A_BUFFER = 4 * (_READS + 1), 2 * _READS


@dataclass(frozen=True)
class ReadRequest:
    """Request to read the values of an entry from a dataset.

    Attributes:
        entry: Entry whose values are filled.
        stored: The dataset.
        sums: Checksums of the dataset, to which those of the bytes are added; None if they are not checked.
    """

    entry: TensorRange
    stored: StoredTensor
    sums: Sums | None


class _Piece:
    """A box on its way into an TensorRange's values: `words` are to be read, and then landed."""

    def __init__(self, request: ReadRequest, box: TensorBox) -> None:
        self.request, self.box = request, box
        entry = request.entry
        self._filling = box.filling(entry.values)
        self._view = self._filling.__enter__()
        self._direct = on_host(entry.values.device) and self._view.is_contiguous() and not entry.added
        target = self._view if self._direct else torch.empty(box.shape, dtype=self._view.dtype)
        self._target = target.reshape(-1)
        self.words: Words = self._target.numpy().view(f"u{request.stored.item_bytes}")

    def land(self) -> None:
        """Add what was read to the sums, and bring it to the values where it does not lie there."""
        request, box, view = self.request, self.box, self._view
        if request.sums is not None:
            checksum.add(request.sums, self.words, box.start, box.shape, request.stored.shape)
        target, dtype = self._target.view(box.shape), request.entry.values.dtype
        if request.entry.added:
            view.view(dtype).add_(target.view(dtype).to(view.device))
        elif not self._direct:
            view.copy_(target)
        self._filling.__exit__(None, None, None)


@dataclass(frozen=True)
class TensorSource:
    """An open checkpoint file; no more than `buffer_bytes` are held besides what is filled."""

    path: Path
    descriptor: int
    readers: ThreadPoolExecutor
    buffer_bytes: int = BUFFER_BYTES

    def fill(self, requests: Iterable[ReadRequest], zero_padding: bool = True) -> None:
        """Read the values of all requests, in their order, and add their checksums to the given sums.

        Args:
            requests: The requests.
            zero_padding: True to fill the padding of entries with zeros. False to leave it unchanged.

        Raises:
            InputOutputError: The file cannot be read, or is truncated.
        """
        under_way: deque[tuple[Future[None], list[_Piece]]] = deque()
        for batch in _batches(self._pieces(requests, zero_padding), self._part_bytes):
            under_way.append((self.readers.submit(self._read_batch, batch), batch))
            if len(under_way) > _READS:
                _land(*under_way.popleft())
        while under_way:
            _land(*under_way.popleft())

    @property
    def _part_bytes(self) -> int:
        """Of a piece that is read into memory of its own, at most; and of a batch, at least."""
        return min(_PIECE_BYTES, self.buffer_bytes // _PIECES_A_BUFFER)

    def _pieces(self, requests: Iterable[ReadRequest], zero_padding: bool) -> Iterator[_Piece]:
        for each in requests:
            entry, item_bytes = each.entry, each.stored.item_bytes
            boxes = boxes_of(entry)
            read = sum(box.elements for box in boxes)
            if zero_padding and not entry.added and read < entry.values.numel():
                entry.values.zero_()
            for box in boxes:
                most = _PIECE_BYTES if _is_direct(entry, box) else self._part_bytes
                limit = max(1, most // item_bytes)
                for part in box.cut(limit):
                    yield _Piece(each, part)

    def _read_batch(self, batch: Iterable[_Piece]) -> None:
        for piece in batch:
            self.read_box(piece.words, piece.box, piece.request.stored)

    def read_box(self, words: Words, box: TensorBox, stored: StoredTensor) -> None:
        """Fill a flat array with the elements of a box of a dataset."""
        rest = words
        for group in flat_runs(box.start, box.shape, stored.shape):
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

    def _read_runs(self, rows: Words, group: FlatRuns, stored: StoredTensor) -> None:
        size, room = stored.item_bytes, self.buffer_bytes // _SPANS_A_BUFFER
        offset = stored.offset + group.first * size
        if group.count == 1 or group.stride == group.length:
            self.read(rows, offset)
        elif group.length * size >= _SIEVED_BYTES or group.stride * size > room:
            for row in range(group.count):
                self.read(rows[row], offset + row * group.stride * size)
        else:
            step = max(1, room // (group.stride * size))
            for row in range(0, group.count, step):
                count = min(step, group.count - row)
                span = np.empty((count - 1) * group.stride + group.length, rows.dtype)
                self.read(span, offset + row * group.stride * size)
                rows[row : row + count] = np.lib.stride_tricks.as_strided(
                    span, (count, group.length), (group.stride * size, size), writeable=False
                )


@contextmanager
def open_tensors(path: Path, buffer_bytes: int = BUFFER_BYTES) -> Iterator[TensorSource]:
    """The file open for reading, without HDF5."""
    descriptor = os.open(path, os.O_RDONLY)
    if hasattr(os, "posix_fadvise"):
        # The system reads ahead, farther than usual. Asked by POSIX_FADV_WILLNEED it would do so in small
        # pages, which take it twice the time.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    readers = ThreadPoolExecutor(_READS, thread_name_prefix="read")
    try:
        yield TensorSource(path, descriptor, readers, buffer_bytes)
    finally:
        # Nothing is read any more into memory that is let go, or from a file that is opened next.
        readers.shutdown(cancel_futures=True)
        os.close(descriptor)


def _is_direct(entry: TensorRange, box: TensorBox) -> bool:
    """Whether a box is read to where it stays."""
    values = entry.values
    if not isinstance(values, Tensor) or not on_host(values.device) or entry.added:
        return False
    return box.view(values).is_contiguous()


def _batches(pieces: Iterable[_Piece], least_bytes: int) -> Iterator[list[_Piece]]:
    """Small pieces together: handing one over takes longer than reading it."""
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.words.nbytes
        if size >= least_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _land(reading: Future[None], batch: Iterable[_Piece]) -> None:
    reading.result()
    for piece in batch:
        piece.land()
