"""Reading of boxes of datasets as plain bytes from an open checkpoint file.

Two threads read from the disk, while the calling thread computes checksums of the boxes that have been read,
in order. So neither the disk nor the processor waits.
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
from hpctrain.checkpoint.tensor_ranges import FlatRuns, TensorBox, TensorRange, boxes_of, split_into_runs
from hpctrain.errors import InputOutputError
from hpctrain.host.device import on_host

BUFFER_BYTES = 16 << 20
"""Largest number of bytes that reading allocates in addition to the values that are filled."""

_SIEVED_BYTES = 32 << 10
"""Number of bytes below which runs are read in one operation with what is between them (data sieving)."""

_READ_BYTES = 1 << 20
"""Number of bytes that are read at a time: few enough to be in the cache for the checksum, and enough for a
task of a thread.
"""

_READS = 2
"""Number of reads at a time. One copies from the page cache while the other one waits for the disk."""

_READS_PER_BUFFER, _SPANS_PER_BUFFER = 4 * (_READS + 1), 2 * _READS
"""Shares of the buffer. One half is for batches, of less than two reads each. The other half is for the
ranges of the file that sieved runs span.
"""


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


class _BoxRead:
    """Box that is read into the values of a TensorRange.

    Args:
        request: Request to which the box belongs.
        box: The box.

    Attributes:
        words: Memory into which the elements are read; `finish` follows.
    """

    def __init__(self, request: ReadRequest, box: TensorBox) -> None:
        self.request, self.box = request, box
        entry = request.entry
        self._filling = box.filling(entry.values)
        self._view = self._filling.__enter__()
        self._direct = on_host(entry.values.device) and self._view.is_contiguous() and not entry.added
        target = self._view if self._direct else torch.empty(box.shape, dtype=self._view.dtype)
        self._target = target.reshape(-1)
        self.words: Words = self._target.numpy().view(f"u{request.stored.item_bytes}")

    def finish(self) -> None:
        """Update the checksums, and copy the elements into the values if they were not read in place."""
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
    """Open checkpoint file, from which boxes of datasets are read.

    Attributes:
        path: The file.
        descriptor: Its file descriptor.
        readers: Threads that read.
        buffer_bytes: Largest number of bytes that reading allocates.
    """

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
        in_flight: deque[tuple[Future[None], list[_BoxRead]]] = deque()
        for batch in _batches(self._box_reads(requests, zero_padding), self._part_bytes):
            in_flight.append((self.readers.submit(self._read_batch, batch), batch))
            if len(in_flight) > _READS:
                _finish(*in_flight.popleft())
        while in_flight:
            _finish(*in_flight.popleft())

    @property
    def _part_bytes(self) -> int:
        """Largest size in bytes of a box that is not read in place, and smallest size of a batch."""
        return min(_READ_BYTES, self.buffer_bytes // _READS_PER_BUFFER)

    def _box_reads(self, requests: Iterable[ReadRequest], zero_padding: bool) -> Iterator[_BoxRead]:
        """Yield the boxes that all requests read, cut to the size of a read, and fill padding with zeros."""
        for each in requests:
            entry, item_bytes = each.entry, each.stored.item_bytes
            boxes = boxes_of(entry)
            read = sum(box.elements for box in boxes)
            if zero_padding and not entry.added and read < entry.values.numel():
                entry.values.zero_()
            for box in boxes:
                most = _READ_BYTES if _is_direct(entry, box) else self._part_bytes
                limit = max(1, most // item_bytes)
                for part in box.cut(limit):
                    yield _BoxRead(each, part)

    def _read_batch(self, batch: Iterable[_BoxRead]) -> None:
        for each in batch:
            self.read_box(each.words, each.box, each.request.stored)

    def read_box(self, words: Words, box: TensorBox, stored: StoredTensor) -> None:
        """Fill a flat array with the elements of a box of a dataset."""
        for runs, rows in split_into_runs(words, box.start, box.shape, stored.shape):
            self._read_runs(rows, runs, stored)

    def read_elements(self, stored: StoredTensor, first: int, count: int, buffer: NDArray[np.uint8]) -> Words:
        """Read the elements [count] of a flattened dataset from `first` on into a buffer, and return them."""
        words: Words = buffer[: count * stored.item_bytes].view(f"u{stored.item_bytes}")
        self.read(words, stored.offset + first * stored.item_bytes)
        return words

    def read(self, words: Words, offset: int) -> None:
        """Fill a contiguous array from the file at `offset` bytes.

        Raises:
            InputOutputError: The file cannot be read, or is truncated.
        """
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

    def _read_runs(self, rows: Words, runs: FlatRuns, stored: StoredTensor) -> None:
        """Read runs: in one operation, each by itself, or several with what is between them."""
        size, span_bytes = stored.item_bytes, self.buffer_bytes // _SPANS_PER_BUFFER
        offset = stored.offset + runs.first * size
        if runs.count == 1 or runs.stride == runs.length:
            self.read(rows, offset)
        elif runs.length * size >= _SIEVED_BYTES or runs.stride * size > span_bytes:
            for row in range(runs.count):
                self.read(rows[row], offset + row * runs.stride * size)
        else:
            step = max(1, span_bytes // (runs.stride * size))
            for row in range(0, runs.count, step):
                count = min(step, runs.count - row)
                span = np.empty((count - 1) * runs.stride + runs.length, rows.dtype)
                self.read(span, offset + row * runs.stride * size)
                rows[row : row + count] = np.lib.stride_tricks.as_strided(
                    span, (count, runs.length), (runs.stride * size, size), writeable=False
                )


def typed_values(words: Words, kind: str) -> Tensor:
    """Return elements of a dataset as a view of their bits with its dtype; values of bool as uint8."""
    signed = torch.from_numpy(words.view(f"i{words.itemsize}"))
    return signed.view(torch.uint8 if kind == "bool" else getattr(torch, kind))


@contextmanager
def open_tensors(path: Path, buffer_bytes: int = BUFFER_BYTES) -> Iterator[TensorSource]:
    """Open a checkpoint file for reading without HDF5, and close it after the block."""
    descriptor = os.open(path, os.O_RDONLY)
    if hasattr(os, "posix_fadvise"):
        # The system reads ahead farther than usual. POSIX_FADV_WILLNEED would use small pages, which takes
        # twice the time.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    readers = ThreadPoolExecutor(_READS, thread_name_prefix="read")
    try:
        yield TensorSource(path, descriptor, readers, buffer_bytes)
    finally:
        # No thread may read into freed memory, or from a file that gets the same descriptor.
        readers.shutdown(cancel_futures=True)
        os.close(descriptor)


def _is_direct(entry: TensorRange, box: TensorBox) -> bool:
    """Return True if a box can be read into the memory of the values itself."""
    values = entry.values
    if not isinstance(values, Tensor) or not on_host(values.device) or entry.added:
        return False
    return box.view(values).is_contiguous()


def _batches(box_reads: Iterable[_BoxRead], least_bytes: int) -> Iterator[list[_BoxRead]]:
    """Yield batches of small boxes, since starting a task takes longer than reading a small box."""
    batch: list[_BoxRead] = []
    size = 0
    for box_read in box_reads:
        batch.append(box_read)
        size += box_read.words.nbytes
        if size >= least_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _finish(reading: Future[None], batch: Iterable[_BoxRead]) -> None:
    """Wait until a batch is read, and finish its boxes."""
    reading.result()
    for box_read in batch:
        box_read.finish()
