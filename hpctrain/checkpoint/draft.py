"""Checkpoint that is being written: boxes of this rank, their checksums, and completion by all ranks.

The steps are `begin_draft` (collective), `store` and `sync_and_verify` (local, so that a thread may do
them), and `finish` (collective). Only then the file gets its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hpctrain.checkpoint import checksum
from hpctrain.checkpoint.agree import raise_on_all_ranks, reduce_integers, shorten_problems
from hpctrain.checkpoint.checkpoint_index import StoredTensor, examine
from hpctrain.checkpoint.checksum import Sums, Words
from hpctrain.checkpoint.create import Tensors, complete, create, temporary_name
from hpctrain.checkpoint.tensor_ranges import TensorBox, TensorRange, boxes_of
from hpctrain.checkpoint.tensor_source import open_tensors
from hpctrain.checkpoint.verify_checksums import damage_message
from hpctrain.checkpoint.writeback import start_writing
from hpctrain.comm.error_messages import error_reason, with_final_name
from hpctrain.comm.group import Group
from hpctrain.errors import InputOutputError
from hpctrain.files import flush_to_disk, naming
from hpctrain.host.device import on_host

PIECE_BYTES = 4 << 20
"""Largest number of bytes that a rank writes at a time, so that they are in the cache for the checksum."""

_WRITEBACK_BYTES = 8 << 20
"""Number of bytes after which the system is told to write to the disk."""


@dataclass(frozen=True)
class DraftBox:
    """Box of a dataset that this rank writes in one operation.

    Attributes:
        entry: Range that has the values.
        box: The box.
        stored: The dataset.
    """

    entry: TensorRange
    box: TensorBox
    stored: StoredTensor

    @property
    def bytes(self) -> int:
        """Number of bytes in the file."""
        return self.box.elements * self.stored.item_bytes

    @property
    def span(self) -> tuple[int, int]:
        """Offset and length in bytes of the smallest range of the file that holds the box."""
        return self.stored.span(self.box.start, self.box.shape)

    def device_values(self) -> Tensor | None:
        """Return the elements as bits in integers if they are on a GPU; otherwise None."""
        values = self.entry.values
        return self.box.view(values) if isinstance(values, Tensor) and not on_host(values.device) else None

    def load(self) -> Words:
        """Return the current elements, flat, as bits in integers. This waits for the GPU's current stream."""
        values = self.box.load(self.entry.values).contiguous().cpu().numpy().reshape(-1)
        words: Words = values.view(f"u{values.itemsize}")
        return words


Sink = Callable[[DraftBox, Words], None]
"""Function that writes the elements of a box to the file, and raises an OSError if it cannot."""


@dataclass
class Draft:
    """Checkpoint under its temporary name.

    Attributes:
        path: Name of the complete file.
        group: Ranks that write it.
        datasets: All datasets of the file by name.
        boxes: Boxes that this rank writes.
        sums: Checksums of the boxes that are written.
        descriptor: File descriptor of the temporary file.
        disk: Thread that waits for the disk while others compute.
    """

    path: Path
    group: Group
    datasets: Mapping[str, StoredTensor]
    boxes: Sequence[DraftBox]
    sums: Sums
    descriptor: int
    disk: ThreadPoolExecutor

    @property
    def temporary(self) -> Path:
        """Name of the file until it is complete."""
        return temporary_name(self.path)

    def store(self, sink: Sink, words: Callable[[int], Words] | None = None) -> None:
        """Write this rank's boxes and compute their checksums. Local.

        Args:
            sink: Function that writes a box.
            words: Function that returns the elements of a box by its number; None to load them.

        Raises:
            InputOutputError: The system cannot write.
        """
        waiting = 0  # bytes whose writing to the disk has not been started
        start = end = 0
        for number, draft_box in enumerate(self.boxes):
            content = draft_box.load() if words is None else words(number)
            self._add(self.sums, draft_box, content)
            try:
                sink(draft_box, content)
            except OSError as error:
                raise InputOutputError(
                    f"{self.path}: cannot write {draft_box.stored.dataset}: {error_reason(error)}"
                ) from None
            offset, length = draft_box.span
            start = min(start, offset) if waiting else offset
            end = max(end, offset + length) if waiting else offset + length
            waiting += draft_box.bytes
            if waiting >= _WRITEBACK_BYTES:
                # Boxes are almost in the order of the file, so there is little between them.
                self.disk.submit(start_writing, self.descriptor, start, end - start)
                waiting = 0

    def sync_and_verify(self) -> None:
        """Sync the file to the disk, read this rank's boxes again, and compare their checksums. Local.

        Raises:
            InputOutputError: The file cannot be synced or read, or differs.
        """
        synchronized = self.disk.submit(os.fsync, self.descriptor)
        try:
            written = self._read_back()
        finally:
            with naming(self.path):
                synchronized.result()
        problems = [
            damage_message(self.path, stored, [int(number) for number in different])
            for stored in self.datasets.values()
            if len(different := np.flatnonzero(written[stored.pieces] != self.sums[stored.pieces]))
        ]
        if problems:
            raise InputOutputError(shorten_problems(problems))

    def _read_back(self) -> Sums:
        """Return the checksums of this rank's boxes, computed from the file."""
        sums = np.zeros_like(self.sums)
        with open_tensors(self.temporary) as source:
            buffer = np.empty(max((draft_box.bytes for draft_box in self.boxes), default=0), np.uint8)
            for draft_box in self.boxes:
                words = buffer[: draft_box.bytes].view(f"u{draft_box.stored.item_bytes}")
                source.read_box(words, draft_box.box, draft_box.stored)
                self._add(sums, draft_box, words)
        return sums

    def finish(self) -> None:
        """Write the checksums of all ranks, and rename the file. Collective."""
        total = self.total()
        with raise_on_all_ranks(self.group), self.errors_with_final_name():
            if self.group.rank == 0:
                self.publish(total)

    def total(self) -> Sums:
        """Return the checksums of the complete tensors. Collective."""
        seeds = [checksum.seeds(name, stored.kind, stored.shape) for name, stored in self.datasets.items()]
        total: Sums = reduce_integers(self.group, self.sums).view(np.uint64)
        return total + np.concatenate(seeds) if seeds else total

    def publish(self, total: Sums) -> None:
        """Complete the file, validate its index, and rename it. Rank 0 alone calls this."""
        complete(self.temporary, total)
        flush_to_disk(self.temporary)
        examine(self.temporary)
        self.temporary.replace(self.path)
        flush_to_disk(self.path.parent)

    def errors_with_final_name(self) -> AbstractContextManager[None]:
        """Return a context in which errors name the complete file instead of the temporary one."""
        return with_final_name(self.temporary, self.path)

    def close(self, failed: bool) -> None:
        """Close the file, and delete it if writing failed. Each rank calls this once."""
        self.disk.shutdown(cancel_futures=True)
        os.close(self.descriptor)
        if failed and self.group.rank == 0:
            with suppress(OSError):
                self.temporary.unlink()

    def _add(self, sums: Sums, draft_box: DraftBox, words: Words) -> None:
        """Add the elements of a box to checksums of the file."""
        stored = draft_box.stored
        checksum.add(sums[stored.pieces], words, draft_box.box.start, draft_box.box.shape, stored.shape)


def saving_bytes(elements: int, item_bytes: int) -> int:
    """Return the bytes that a rank allocates to save tensors of at most this many elements.

    They are a buffer to read the written file again, and the memory of checksums.

    Args:
        elements: Number of elements of the largest local tensor.
        item_bytes: Size of an element in bytes.
    """
    return min(PIECE_BYTES, elements * item_bytes) + checksum.working_bytes(elements)


def begin_draft(
    path: Path,
    group: Group,
    entries: Sequence[TensorRange],
    state: Mapping[str, Any],
    piece_bytes: int = PIECE_BYTES,
) -> Draft:
    """Create the file of a checkpoint, and divide this rank's entries into boxes. Collective.

    Args:
        path: Name of the complete file.
        group: Ranks that write it.
        entries: Ranges of this rank. Together, the ranges of all ranks must have each element of each
            dataset once.
        state: Training state.
        piece_bytes: Largest number of bytes of a box.

    Raises:
        InputOutputError: The file cannot be created. All ranks raise it.
    """
    tensors = _agreed_tensors(group, entries)
    temporary = temporary_name(path)
    rows: list[tuple[Any, ...]] = []
    try:
        with with_final_name(temporary, path):
            with raise_on_all_ranks(group):
                if group.rank == 0:
                    rows = [stored.row for stored in create(temporary, tensors, state).values()]
            datasets = {row[0]: StoredTensor(*row) for row in group.broadcast_object(rows)}
            boxes = _local_boxes(group, entries, datasets, piece_bytes)
            with raise_on_all_ranks(group):
                # This fails if ranks do not share the folder. Opening it with MPI would hang then.
                descriptor = os.open(temporary, os.O_RDWR)
    except BaseException:
        if group.rank == 0:
            with suppress(OSError):
                temporary.unlink()
        raise
    disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
    count = sum(checksum.pieces(stored.elements) for stored in datasets.values())
    return Draft(path, group, datasets, boxes, np.zeros(count, np.uint64), descriptor, disk)


def _local_boxes(
    group: Group, entries: Sequence[TensorRange], datasets: Mapping[str, StoredTensor], piece_bytes: int
) -> list[DraftBox]:
    """Return the boxes that this rank writes: those that a step changes, then others, each in file order."""
    boxes_by_dataset: dict[str, list[DraftBox]] = {name: [] for name in datasets}
    for entry in entries:
        part = entry.part(*entry.share())
        limit = max(1, piece_bytes // part.values.element_size())
        stored = datasets[entry.dataset]
        boxes_by_dataset[entry.dataset] += [
            DraftBox(part, cut, stored) for box in boxes_of(part) for cut in box.cut(limit)
        ]
    local = [sum(each.box.elements for each in boxes) for boxes in boxes_by_dataset.values()]
    counts = reduce_integers(group, np.array(local, np.int64))
    for stored, count in zip(datasets.values(), counts, strict=True):
        if count != stored.elements:
            raise RuntimeError(f"{stored.dataset}: the ranks have {count} of {stored.elements} elements")
    in_order = (each for boxes in boxes_by_dataset.values() for each in boxes)
    return sorted(in_order, key=lambda each: not each.entry.changes_in_step)


def _agreed_tensors(group: Group, entries: Sequence[TensorRange]) -> Tensors:
    """Return the datasets of all ranks, sorted by name. Collective."""
    local = sorted({(entry.dataset, entry.kind, entry.shape) for entry in entries})
    # Many ranks have the same list of datasets, so only the first rank of each list sends it.
    digest = blake2b(repr(local).encode()).hexdigest()
    first = group.all_gather_object(digest).index(digest) == group.rank
    tensors: Tensors = {}
    for rows in group.all_gather_object(local if first else []):
        for dataset, kind, shape in rows:
            described = (kind, tuple(shape))
            known = tensors.setdefault(dataset, described)
            if known != described:
                raise RuntimeError(f"{dataset}: ranks have it as {known} and as {described}")
    return dict(sorted(tensors.items()))
