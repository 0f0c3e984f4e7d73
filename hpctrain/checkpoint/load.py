"""Loading of checkpoints into the local tensors of any layout, with verification of checksums.

Ranks read plain bytes at the offsets of datasets. So reading requires no parallel HDF5 and no collective
calls that could hang on a damaged file, and only one rank reads metadata.

Ranks with the same elements begin with different shares, so that each share is read from the disk once and
then from the page cache. One of these ranks adds a share to the checksums. The checksums of all ranks are
reduced and compared with the stored ones. They differ for damaged pieces, and for pieces that were not read
completely or more than once. One rank reads such a piece again to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.checkpoint import checksum
from hpctrain.checkpoint.agree import first_difference, raise_on_all_ranks, reduce_integers
from hpctrain.checkpoint.checkpoint_index import CheckpointIndex, examine
from hpctrain.checkpoint.checksum import Sums
from hpctrain.checkpoint.tensor_ranges import TensorRange, boxes_of, flat_runs
from hpctrain.checkpoint.tensor_source import BUFFER_BYTES, ReadRequest, open_tensors
from hpctrain.checkpoint.verify_checksums import verify_pieces
from hpctrain.comm.group import Group
from hpctrain.errors import InputOutputError
from hpctrain.sharding.state import MASTER, MODEL, OPTIMIZER

_COMPLETE_KINDS = (MODEL, MASTER, OPTIMIZER.removesuffix("/"))
"""Kinds of state of which a run reads all datasets or none. It may leave out others, such as `/reducer`."""


def load(
    source: str | Path | CheckpointIndex,
    group: Group,
    entries: Sequence[TensorRange],
    strict: bool = True,
    buffer_bytes: int = BUFFER_BYTES,
    zero_padding: bool = True,
    left: Collection[str] = (),
) -> dict[str, Any]:
    """Read the values of the entries of all ranks from a checkpoint. Collective.

    After an error the values are undefined.

    Args:
        source: The file, or its index.
        group: The ranks.
        entries: Ranges of this rank, whose values are filled in place.
        strict: True if the file may not have parameters or states of the optimizer that no rank reads, in
            folders ("/model", "/master", "/optimizer") from which a rank reads.
        buffer_bytes: Largest number of bytes that a rank allocates.
        zero_padding: True to fill padding with zeros. False to leave it unchanged.
        left: Kinds that `strict` does not apply to.

    Returns:
        The training state.

    Raises:
        HpctrainError: The names of datasets differ. All ranks raise the same error.
        InputOutputError: Shapes or dtypes differ, or the file is missing, truncated or damaged.
    """
    structure = source if isinstance(source, CheckpointIndex) else examine(Path(source), group)
    same_names = all(entry.dataset in structure.datasets for entry in entries)
    _raise_first(group, list(_differences(structure, entries)), same_names)
    if strict:
        _raise_first(group, _surplus(structure, group, entries, left), same_names=False)
    sums = np.zeros(len(structure.sums), np.uint64)
    touched = np.zeros(len(structure.sums), np.int64)
    with raise_on_all_ranks(group), open_tensors(structure.path, buffer_bytes) as file:
        file.fill(_read_requests(structure, entries, sums, touched), zero_padding)
    totals = reduce_integers(group, sums).view(np.uint64)
    touched = reduce_integers(group, touched, "max")
    stored = structure.datasets.values()
    for each in stored:
        totals[each.pieces] += checksum.seeds(each.dataset, each.kind, each.shape)
    different = (totals != structure.sums) & (touched != 0)
    doubtful = [(each, int(piece)) for each in stored for piece in np.flatnonzero(different[each.pieces])]
    verify_pieces(structure, group, doubtful[group.rank :: group.size])
    return structure.state


@contextmanager
def in_types(
    entries: Sequence[TensorRange], kind: Callable[[TensorRange], str]
) -> Iterator[list[TensorRange]]:
    """Yield entries with other dtypes for the block to fill, then convert their values to the given ones.

    Args:
        entries: Entries that have the values afterwards.
        kind: Function that returns the dtype in which an entry is read, such as "float32".
    """
    converted = [
        entry
        if entry.kind == kind(entry)
        else replace(entry, values=_tensor_of(entry).to(getattr(torch, kind(entry))))
        for entry in entries
    ]
    yield converted
    for entry, each in zip(entries, converted, strict=True):
        if each is not entry:
            _tensor_of(entry).copy_(_tensor_of(each))


def _tensor_of(entry: TensorRange) -> Tensor:
    assert isinstance(entry.values, Tensor), (
        f"{entry.dataset}: has another dtype than the checkpoint, and is in a file"
    )
    return entry.values


def read_state(path: str | Path, group: Group | None = None) -> dict[str, Any]:
    """Return the training state of a checkpoint, with "versions", without reading tensors.

    Arguments and errors are those of `examine`.
    """
    return examine(Path(path), group).state


def _differences(structure: CheckpointIndex, entries: Sequence[TensorRange]) -> Iterator[str]:
    """Yield messages about entries that the file lacks or has with another shape or dtype."""
    for entry in entries:
        stored = structure.datasets.get(entry.dataset)
        where = f"{structure.path}: {entry.dataset}"
        if stored is None:
            yield f"{where}: not in this checkpoint, expected with shape {list(entry.shape)}"
        elif stored.shape != entry.shape:
            yield f"{where}: has shape {list(stored.shape)}, expected {list(entry.shape)}"
        elif stored.kind != entry.kind:
            yield f"{where}: has type {stored.kind}, expected {entry.kind}"


def _surplus(
    structure: CheckpointIndex, group: Group, entries: Sequence[TensorRange], left: Collection[str]
) -> list[str]:
    """Return messages about datasets that no rank reads. Auxiliary models may be left out. Collective."""
    names = list(structure.datasets)
    read = {entry.dataset for entry in entries}
    complete, of_left = (
        tuple(f"/{before}{kind}/" for kind in kinds for before in ("", "replicas."))
        for kinds in (_COMPLETE_KINDS, left)
    )
    unread, may_be_left, is_read = range(3)
    flags = [
        is_read
        if name in read
        else (may_be_left if name.startswith(of_left) or not name.startswith(complete) else unread)
        for name in names
    ]
    flags_of_all = reduce_integers(group, np.array(flags, np.int64), "max")
    folder_of = {name: (name.split("/")[1], structure.auxiliary_model(name)) for name in names}
    folders = {folder_of[name] for name, flag in zip(names, flags_of_all, strict=True) if flag == is_read}
    return [
        f"{structure.path}: {name}: in this checkpoint, but not in this model"
        for name, flag in zip(names, flags_of_all, strict=True)
        if flag == unread and folder_of[name] in folders
    ]


def _raise_first(group: Group, problems: Sequence[str], same_names: bool) -> None:
    """Raise an error about the first problem of any rank, with the number of others. Collective.

    Args:
        group: The ranks.
        problems: Problems of this rank.
        same_names: True if the file has the datasets of this rank's entries.

    Raises:
        HpctrainError: The file has other names, so it belongs to another model.
        InputOutputError: The file has the same names but other shapes or dtypes, so no run of its deck has
            written it.
    """
    gathered = group.all_gather_object([list(problems), same_names])
    distinct = list(dict.fromkeys(chain.from_iterable(each for each, _ in gathered)))
    if distinct:
        error = first_difference(distinct)
        raise InputOutputError(error.problems) if all(same for _, same in gathered) else error


def _read_requests(
    structure: CheckpointIndex, entries: Sequence[TensorRange], sums: Sums, touched: NDArray[np.int64]
) -> Iterator[ReadRequest]:
    """Yield the read requests of this rank, and mark the checksum pieces that they touch.

    Several ranks may hold the same elements. Each of them first reads its share, which it adds to the
    checksums, and then the shares of the other ranks. All requests of a turn follow the order of the file.

    Args:
        structure: Structure of the checkpoint.
        entries: Entries of this rank.
        sums: Checksums of all pieces of the checkpoint.
        touched: Flag of each checksum piece, int64 [pieces], which is set to 1 for pieces that are read.
    """
    datasets = structure.datasets
    in_order = sorted(entries, key=lambda entry: datasets[entry.dataset].offset)
    for turn in range(3):
        for entry in in_order:
            stored, count = datasets[entry.dataset], entry.values.numel()
            if turn == 0:
                _touch(touched[stored.pieces], entry)
            first, last = entry.share()
            start, end = ((first, last), (last, count), (0, first))[turn]
            if start < end:
                part = entry if end - start == count else entry.part(start, end)
                yield ReadRequest(part, stored, sums[stored.pieces] if turn == 0 else None)


def _touch(touched: NDArray[np.int64], entry: TensorRange) -> None:
    """Mark the checksum pieces that have elements of a TensorRange."""
    for box in boxes_of(entry):
        for runs in flat_runs(box.start, box.shape, entry.shape):
            if runs.count == 1:
                end = runs.first + runs.length
                touched[runs.first // checksum.PIECE : -(-end // checksum.PIECE)] = 1
                continue
            first = runs.first + runs.stride * np.arange(runs.count)
            last = first + runs.length - 1
            touched[first // checksum.PIECE] = 1
            touched[last // checksum.PIECE] = 1
            if runs.length > checksum.PIECE:
                for low, high in zip(first // checksum.PIECE, last // checksum.PIECE, strict=True):
                    touched[low:high] = 1
