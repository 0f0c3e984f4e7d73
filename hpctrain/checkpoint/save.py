"""Saving of checkpoints. A file with the final name is always complete.

Rank 0 creates the file. All ranks then write their boxes, with parallel HDF5 if h5py has it, or else as plain
bytes at the offsets of the datasets. Each rank syncs its part to the disk, reads it again and compares it.
Rank 0 writes the checksums and renames the file.

Opening and closing are collective, and writes are independent. Collective writes are not faster for
contiguous runs, and with Open MPI they hang all ranks if one rank cannot write.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.checkpoint.agree import raise_on_all_ranks
from hpctrain.checkpoint.checksum import Words
from hpctrain.checkpoint.draft import PIECE_BYTES, Draft, DraftBox, begin_draft
from hpctrain.checkpoint.tensor_ranges import TensorRange, split_into_runs
from hpctrain.comm.group import Group
from hpctrain.comm.parallel_files import open_on_all_ranks
from hpctrain.errors import HpctrainError, InputOutputError


def save(
    path: str | Path,
    group: Group,
    entries: Sequence[TensorRange],
    state: Mapping[str, Any],
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Write a checkpoint with the entries of all ranks. Collective.

    After an error the new file is deleted, and an older file of the same name is unchanged.

    Args:
        path: The file.
        group: Ranks that write it.
        entries: Ranges of this rank. Together, the ranges of all ranks must have each element of each
            dataset once.
        state: Training state, as JSON. Its key "deck", if it has one, is stored as a text of its own.
        piece_bytes: Largest number of bytes that a rank allocates in addition to its entries.

    Raises:
        InputOutputError: The file cannot be written. All ranks raise it.
    """
    draft = begin_draft(Path(path), group, entries, state, piece_bytes)
    failed = True
    try:
        # Without parallel HDF5, and on one rank, plain bytes are written at the offsets of the datasets: HDF5
        # may crash if one of its writes fails.
        if needs_mpi(group):
            _store_with_hdf5(draft)
        else:
            with raise_on_all_ranks(group), draft.errors_with_final_name():
                draft.store(partial(write_at_offsets, draft.descriptor))
        with raise_on_all_ranks(group), draft.errors_with_final_name():
            draft.sync_and_verify()
        draft.finish()
        failed = False
    finally:
        draft.close(failed)


def needs_mpi(group: Group) -> bool:
    """Return True if `save` opens a file on all ranks of this group through MPI, as parallel HDF5 does."""
    return group.size > 1 and bool(h5py.get_config().mpi)


def write_at_offsets(descriptor: int, draft_box: DraftBox, words: Words) -> None:
    """Write the elements of a box at their offsets in the file, run by run, without HDF5 and MPI."""
    stored, box = draft_box.stored, draft_box.box
    for runs, rows in split_into_runs(words, box.start, box.shape, stored.shape):
        adjacent = runs.stride == runs.length
        for number, row in enumerate(rows.reshape(1, -1) if adjacent else rows):
            offset = stored.offset + (runs.first + number * runs.stride) * stored.item_bytes
            content = memoryview(row.view(np.uint8).data)
            while content:
                done = os.pwrite(descriptor, content, offset)
                content, offset = content[done:], offset + done


def _write_with_hdf5(file: h5py.h5f.FileID, draft_box: DraftBox, words: Words) -> None:
    """Write the elements of a box by one independent call of HDF5."""
    dataset = h5py.h5d.open(file, draft_box.stored.dataset.encode())
    space = dataset.get_space()
    space.select_hyperslab(draft_box.box.start, draft_box.box.shape)
    dataset.write(h5py.h5s.create_simple((words.size,)), space, words.view(dataset.dtype))


def _store_with_hdf5(draft: Draft) -> None:
    """Write with parallel HDF5. All ranks open and close the file, even if one cannot write. Collective."""
    problems: list[str] = []
    with raise_on_all_ranks(draft.group), draft.errors_with_final_name():
        with open_on_all_ranks(draft.temporary, draft.group) as file:
            try:
                draft.store(partial(_write_with_hdf5, file))
            except HpctrainError as error:
                problems += error.problems
        if problems:
            raise InputOutputError(problems[:1])
