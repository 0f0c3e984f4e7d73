"""Save a checkpoint: one file, complete or not there.

Rank 0 lays the file out; all ranks then write their pieces, with parallel HDF5 where h5py has it and at
the pieces' places in the file where it has not. Every rank's part reaches the disk and is read back and
compared; rank 0 adds the checksums, and only then the file gets its name.

Opening and closing are collective; each write is its rank's own. Collective writes gain nothing where the
pieces are runs of the file, and in Open MPI they hang all ranks when the disk refuses one rank's write.
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
from hpctrain.checkpoint.tensor_ranges import TensorRange, flat_runs
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
    """Write a checkpoint of what all ranks' entries hold together; collective over the group.

    Ranks may pass different datasets and different pieces; together they must hold every element, once.
    `state` is JSON; its "deck", if it has one, is a text and is stored as such. A rank holds at most
    `piece_bytes` besides its entries. InputOutputError, the same on all ranks, if the file cannot be
    written (it is then removed; a checkpoint that had the name before is untouched).
    """
    draft = begin_draft(Path(path), group, entries, state, piece_bytes)
    failed = True
    try:
        # Without parallel HDF5 the ranks write where the datasets' bytes lie in the file. So does one rank
        # alone: HDF5 does not survive that a write of its own fails.
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


def write_at_offsets(descriptor: int, piece: DraftBox, words: Words) -> None:
    """Write plain bytes where they belong in the file, without HDF5 and without MPI: each run by itself."""
    stored, rest = piece.stored, words
    for group in flat_runs(piece.box.start, piece.box.shape, stored.shape):
        count = group.count * group.length
        rows = rest[:count].reshape(group.count, group.length)
        if group.stride == group.length:
            rows = rows.reshape(1, -1)
        for number, row in enumerate(rows):
            offset = stored.offset + (group.first + number * group.stride) * stored.item_bytes
            content = memoryview(row.view(np.uint8).data)
            while content:
                done = os.pwrite(descriptor, content, offset)
                content, offset = content[done:], offset + done
        rest = rest[count:]


def _write_with_hdf5(file: h5py.h5f.FileID, piece: DraftBox, words: Words) -> None:
    """One independent call of HDF5."""
    dataset = h5py.h5d.open(file, piece.stored.dataset.encode())
    space = dataset.get_space()
    space.select_hyperslab(piece.box.start, piece.box.shape)
    dataset.write(h5py.h5s.create_simple((words.size,)), space, words.view(dataset.dtype))


def _store_with_hdf5(draft: Draft) -> None:
    """All ranks open and close the file, whatever happens to one; then what happened is raised."""
    problems: list[str] = []
    with raise_on_all_ranks(draft.group), draft.errors_with_final_name():
        with open_on_all_ranks(draft.temporary, draft.group) as file:
            try:
                draft.store(partial(_write_with_hdf5, file))
            except HpctrainError as error:
                problems += error.problems
        if problems:
            raise InputOutputError(problems[:1])
