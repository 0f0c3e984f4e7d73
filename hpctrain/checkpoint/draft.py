"""A checkpoint on its way to the disk: what this rank writes of it, checks in it, and agrees on with others.

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
"""Bytes of one rank that are written at a time, at most: they stay in the cache while they are added up."""
_WRITEBACK_BYTES = 8 << 20


@dataclass(frozen=True)
class DraftBox:
    """A box of a dataset that this rank writes at once."""

    entry: TensorRange
    box: TensorBox
    stored: StoredTensor

    @property
    def bytes(self) -> int:
        """What it takes in the file."""
        return self.box.elements * self.stored.item_bytes

    @property
    def span(self) -> tuple[int, int]:
        """Offset and length of the smallest range of the file that holds it, in bytes."""
        return self.stored.span(self.box.start, self.box.shape)

    def device_values(self) -> Tensor | None:
        """Return its elements, their bits as integers, if a GPU holds them; otherwise None."""
        values = self.entry.values
        return self.box.view(values) if isinstance(values, Tensor) and not on_host(values.device) else None

    def load(self) -> Words:
        """Its elements as they are now, flat, their bits as integers of the same size.

        The host waits for a GPU's current stream.
        """
        values = self.box.load(self.entry.values).contiguous().cpu().numpy().reshape(-1)
        words: Words = values.view(f"u{values.itemsize}")
        return words


Sink = Callable[[DraftBox, Words], None]
"""Puts the elements of a piece where they belong. OSError where the system refuses."""


@dataclass
class Draft:
    """One checkpoint under its temporary name."""

    path: Path
    group: Group
    datasets: Mapping[str, StoredTensor]
    pieces: Sequence[DraftBox]
    sums: Sums
    descriptor: int
    disk: ThreadPoolExecutor  # the thread that waits for the disk while others compute

    @property
    def temporary(self) -> Path:
        """The name it has until it is complete."""
        return temporary_name(self.path)

    def store(self, sink: Sink, words: Callable[[int], Words] | None = None) -> None:
        """Write this rank's pieces and add up their checksums; alone.

        `words` tells the elements of a piece by its number; as a rule they are loaded. InputOutputError
        where the disk refuses.
        """
        waiting = 0  # bytes that the disk does not know of
        start = end = 0
        for number, piece in enumerate(self.pieces):
            content = piece.load() if words is None else words(number)
            self._add(self.sums, piece, content)
            try:
                sink(piece, content)
            except OSError as error:
                raise InputOutputError(
                    f"{self.path}: cannot write {piece.stored.dataset}: {error_reason(error)}"
                ) from None
            offset, length = piece.span
            start = min(start, offset) if waiting else offset
            end = max(end, offset + length) if waiting else offset + length
            waiting += piece.bytes
            if waiting >= _WRITEBACK_BYTES:
                # Pieces are about in the order of the file: in between there is little of others.
                self.disk.submit(start_writing, self.descriptor, start, end - start)
                waiting = 0

    def sync_and_verify(self) -> None:
        """Bring this rank's pieces to the disk; compare what the file holds with their checksums; alone."""
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
        """The checksums of this rank's pieces as the file has them."""
        sums = np.zeros_like(self.sums)
        with open_tensors(self.temporary) as source:
            buffer = np.empty(max((piece.bytes for piece in self.pieces), default=0), np.uint8)
            for piece in self.pieces:
                words = buffer[: piece.bytes].view(f"u{piece.stored.item_bytes}")
                source.read_box(words, piece.box, piece.stored)
                self._add(sums, piece, words)
        return sums

    def finish(self) -> None:
        """Add the checksums, and give the file its name; collective."""
        total = self.total()
        with raise_on_all_ranks(self.group), self.errors_with_final_name():
            if self.group.rank == 0:
                self.publish(total)

    def total(self) -> Sums:
        """The checksums of all ranks together; collective."""
        seeds = [checksum.seeds(name, stored.kind, stored.shape) for name, stored in self.datasets.items()]
        total: Sums = reduce_integers(self.group, self.sums).view(np.uint64)
        return total + np.concatenate(seeds) if seeds else total

    def publish(self, total: Sums) -> None:
        """Complete the file, look at it as a reader would, and give it its name; alone, on rank 0."""
        complete(self.temporary, total)
        flush_to_disk(self.temporary)
        examine(self.temporary)
        self.temporary.replace(self.path)
        flush_to_disk(self.path.parent)

    def errors_with_final_name(self) -> AbstractContextManager[None]:
        """Errors tell the name the file will have, not the temporary one."""
        return with_final_name(self.temporary, self.path)

    def close(self, failed: bool) -> None:
        """Let go of the file; one that failed is removed. Once, on every rank."""
        self.disk.shutdown(cancel_futures=True)
        os.close(self.descriptor)
        if failed and self.group.rank == 0:
            with suppress(OSError):
                self.temporary.unlink()

    def _add(self, sums: Sums, piece: DraftBox, words: Words) -> None:
        stored = piece.stored
        checksum.add(sums[stored.pieces], words, piece.box.start, piece.box.shape, stored.shape)


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
    """Lay out a checkpoint of what all ranks' entries hold together, in pieces of at most `piece_bytes`.

    Collective. Ranks may pass different datasets and different pieces; together they must hold every
    element, once. Errors as in save.
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
            pieces = _pieces(group, entries, datasets, piece_bytes)
            with raise_on_all_ranks(group):
                # Seen by all ranks, or else it is not one shared folder; and then opening it would hang.
                descriptor = os.open(temporary, os.O_RDWR)
    except BaseException:
        if group.rank == 0:
            with suppress(OSError):
                temporary.unlink()
        raise
    disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
    count = sum(checksum.pieces(stored.elements) for stored in datasets.values())
    return Draft(path, group, datasets, pieces, np.zeros(count, np.uint64), descriptor, disk)


def _pieces(
    group: Group, entries: Sequence[TensorRange], datasets: Mapping[str, StoredTensor], piece_bytes: int
) -> list[DraftBox]:
    """What this rank writes: first what a step changes, then the rest, each in the order of the file."""
    pieces: dict[str, list[DraftBox]] = {name: [] for name in datasets}
    for entry in entries:
        part = entry.part(*entry.share())
        limit = max(1, piece_bytes // part.values.element_size())
        stored = datasets[entry.dataset]
        pieces[entry.dataset] += [
            DraftBox(part, cut, stored) for box in boxes_of(part) for cut in box.cut(limit)
        ]
    held = [sum(piece.box.elements for piece in mine) for mine in pieces.values()]
    for stored, count in zip(
        datasets.values(), reduce_integers(group, np.array(held, np.int64)), strict=True
    ):
        if count != stored.elements:
            raise RuntimeError(f"{stored.dataset}: the ranks hold {count} of {stored.elements} elements")
    in_order = (piece for mine in pieces.values() for piece in mine)
    return sorted(in_order, key=lambda piece: not piece.entry.changes_in_step)


def _agreed_tensors(group: Group, entries: Sequence[TensorRange]) -> Tensors:
    """The datasets that any rank holds, in sorted order."""
    mine = sorted({(entry.dataset, entry.kind, entry.shape) for entry in entries})
    # Most ranks hold the same datasets: the first one that holds a list tells it for all.
    digest = blake2b(repr(mine).encode()).hexdigest()
    first = group.all_gather_object(digest).index(digest) == group.rank
    tensors: Tensors = {}
    for rows in group.all_gather_object(mine if first else []):
        for dataset, kind, shape in rows:
            described = (kind, tuple(shape))
            known = tensors.setdefault(dataset, described)
            if known != described:
                raise RuntimeError(f"{dataset}: ranks hold it as {known} and as {described}")
    return dict(sorted(tensors.items()))
