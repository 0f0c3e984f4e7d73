"""Load a checkpoint into whatever pieces the ranks hold, and verify what was read.

Ranks read the bytes of their pieces from the file without HDF5, so that reading needs no parallel HDF5,
no collective call that could hang on a damaged file, and no metadata traffic from every rank.

Ranks that hold the same begin with different parts of it, so that each comes from the disk once and from the
page cache then. Each element is hashed by one of the ranks that read it, and the sums of the whole group are
compared with the stored ones. Where the group did not read a piece whole, once (a model loaded without its
other half, replicas not declared), or where it is damaged, the sums differ; such a piece is read whole by one
rank, whose verdict is final. So all that is read is verified, and as a rule nothing is read for that alone.
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

_WHOLE = (MODEL, MASTER, OPTIMIZER.removesuffix("/"))
"""What kinds are, or begin with, of which a run asks for all or nothing. Of what Summations, Outers, layers
and Products keep it leaves what it has no use for.
"""


def load(
    source: str | Path | CheckpointIndex,
    group: Group,
    entries: Sequence[TensorRange],
    strict: bool = True,
    buffer_bytes: int = BUFFER_BYTES,
    zero_padding: bool = True,
    left: Collection[str] = (),
) -> dict[str, Any]:
    """Fill the entries' values in place, each rank reading its own pieces; collective over the group.

    `source` is the file, or what `examine` found in it. Returns the training state, as read_state does.
    Padding becomes zero, or stays as it is. With `strict`, weights or state of an optimizer that no rank
    asks for are an error if any of their folder ("/model", "/master", "/optimizer") is asked for, and their
    kind is not `left`. After an error the values are not to be used.
    Errors, the same on all ranks: HpctrainError if the file holds other names, InputOutputError if it holds
    other shapes or types, or is missing, truncated or damaged.
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
    """Entries to fill within, of the types that `kind` tells; what they are for has the values afterwards."""
    found = [
        entry
        if entry.kind == kind(entry)
        else replace(entry, values=_tensor_of(entry).to(getattr(torch, kind(entry))))
        for entry in entries
    ]
    yield found
    for entry, each in zip(entries, found, strict=True):
        if each is not entry:
            _tensor_of(entry).copy_(_tensor_of(each))


def _tensor_of(entry: TensorRange) -> Tensor:
    assert isinstance(entry.values, Tensor), f"{entry.dataset}: is not of the file's type where it lies"
    return entry.values


def read_state(path: str | Path, group: Group | None = None) -> dict[str, Any]:
    """The training state given to save, with "versions" added; touches no tensor.

    With a group, collective: rank 0 reads. Errors as in load.
    """
    return examine(Path(path), group).state


def _differences(structure: CheckpointIndex, entries: Sequence[TensorRange]) -> Iterator[str]:
    """Tell which entries the file lacks, or holds with another shape or type."""
    for entry in entries:
        stored = structure.datasets.get(entry.dataset)
        where = f"{structure.path}: {entry.dataset}"
        if stored is None:
            yield f"{where}: not in this checkpoint, expected with shape {list(entry.shape)}"
        elif stored.shape != entry.shape:
            yield f"{where}: has shape {list(stored.shape)}, expected {list(entry.shape)}"
        elif stored.kind != entry.kind:
            yield f"{where}: holds {stored.kind}, expected {entry.kind}"


def _surplus(
    structure: CheckpointIndex, group: Group, entries: Sequence[TensorRange], left: Collection[str]
) -> list[str]:
    """What the file holds and no rank asks for; collective. All of a companion may be left."""
    names = list(structure.datasets)
    asked = {entry.dataset for entry in entries}
    whole, of_left = (
        tuple(f"/{before}{kind}/" for kind in kinds for before in ("", "replicas."))
        for kinds in (_WHOLE, left)
    )
    known = [
        2 if name in asked else int(name.startswith(of_left) or not name.startswith(whole)) for name in names
    ]
    wanted = reduce_integers(group, np.array(known, np.int64), "max")
    of = {name: (name.split("/")[1], structure.auxiliary_model(name)) for name in names}
    folders = {of[name] for name, flag in zip(names, wanted, strict=True) if flag == 2}
    return [
        f"{structure.path}: {name}: in this checkpoint, but not in this model"
        for name, flag in zip(names, wanted, strict=True)
        if not flag and of[name] in folders
    ]


def _raise_first(group: Group, problems: Sequence[str], same_names: bool) -> None:
    """Raise an error about the first problem of any rank, with the number of others; collective.

    A file with other names is of another model (HpctrainError). One with the `same_names`, on all ranks, but
    with other shapes or types was not written by a run of its deck (InputOutputError).
    """
    of_ranks = group.all_gather_object([list(problems), same_names])
    distinct = list(dict.fromkeys(chain.from_iterable(found for found, _ in of_ranks)))
    if distinct:
        error = first_difference(distinct)
        raise InputOutputError(error.problems) if all(same for _, same in of_ranks) else error


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
    """Mark the checksum pieces that hold any of an TensorRange's elements."""
    for box in boxes_of(entry):
        for group in flat_runs(box.start, box.shape, entry.shape):
            if group.count == 1:
                end = group.first + group.length
                touched[group.first // checksum.PIECE : -(-end // checksum.PIECE)] = 1
                continue
            first = group.first + group.stride * np.arange(group.count)
            last = first + group.length - 1
            touched[first // checksum.PIECE] = 1
            touched[last // checksum.PIECE] = 1
            if group.length > checksum.PIECE:
                for one, other in zip(first // checksum.PIECE, last // checksum.PIECE, strict=True):
                    touched[one:other] = 1
