"""Save a checkpoint: one file, complete or not there.

Rank 0 lays the file out under a temporary name, alone, and takes its space on the disk at once, so that
a full disk shows before any tensor is written. All ranks then write their pieces with parallel HDF5.
Rank 0 adds the checksums; every rank's part reaches the disk; the file is read back, compared, and only
then gets its name.

Opening and closing are collective; each write is its rank's own. Collective writes gain nothing where the
pieces are runs of the file, and in Open MPI they hang all ranks when the disk refuses one rank's write.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from errno import ENOSPC
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import h5py
import numpy as np

from hpctrain.checkpoint import checksum
from hpctrain.checkpoint.agree import combined, together
from hpctrain.checkpoint.checksum import Sums
from hpctrain.checkpoint.layout import STORED_AS, Block, Entry, Index, blocks
from hpctrain.checkpoint.structure import CHECKSUMS, DECK, FORMAT, STATE, VERSION
from hpctrain.checkpoint.verify import verify
from hpctrain.checkpoint.versions import library_versions
from hpctrain.comm.group import Group
from hpctrain.comm.outcome import describe
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.units import format_bytes

CALL_BYTES = 64 << 20

# Datasets of a page or more start at one; the space this takes is counted with the file's.
_PAGE = 4096
# Bound of what HDF5 itself stores for one dataset with its attributes and links.
_DESCRIPTION_BYTES = 2048

# Name, element type and global shape of every dataset, by name.
Tensors = dict[str, tuple[str, Index]]


def save(
    path: str | Path,
    group: Group,
    entries: Sequence[Entry],
    state: Mapping[str, Any],
    call_bytes: int = CALL_BYTES,
) -> None:
    """Write a checkpoint of what all ranks' entries hold together; collective over the group.

    Ranks may pass different datasets and different pieces; together they must hold every element, once.
    `state` is JSON; its "deck", if it has one, is a text and is stored as such. A rank moves at most
    `call_bytes` a call, and holds that much besides its entries.
    Errors, the same on all ranks: InputOutputError if the file cannot be written (it is then removed; a
    checkpoint that had the name before is untouched), HpctrainError if h5py cannot write in parallel.
    """
    path = Path(path)
    assert 0 < call_bytes <= 1 << 30, call_bytes
    if group.size > 1 and not h5py.get_config().mpi:
        raise HpctrainError(
            f"{path}: {group.size} ranks cannot write one checkpoint, this h5py was built without MPI; "
            "install h5py against a parallel HDF5 (make install does)"
        )
    tensors = _agreed_tensors(group, entries)
    temporary = temporary_name(path)
    try:
        with together(group):
            if group.rank == 0:
                _create(temporary, tensors, state)
        group.barrier()
        sums = _write_tensors(temporary, group, tensors, entries, call_bytes)
        with together(group):
            if group.rank == 0:
                _complete(temporary, sums)
        with together(group):
            _synchronize(temporary)
        verify(temporary, group)
        with together(group):
            if group.rank == 0:
                temporary.replace(path)
                _synchronize(path.parent)
    except HpctrainError as error:
        if group.rank == 0:
            with suppress(OSError):
                temporary.unlink()
        raise type(error)([text.replace(str(temporary), str(path)) for text in error.problems]) from None


def temporary_name(path: Path) -> Path:
    """The name a checkpoint has while it is written."""
    return path.with_name(f".{path.name}.tmp")


def _agreed_tensors(group: Group, entries: Sequence[Entry]) -> Tensors:
    """The datasets that any rank holds, in sorted order."""
    mine = sorted({(entry.dataset, entry.kind, entry.shape) for entry in entries})
    # Most ranks hold the same datasets: the first one that holds a list tells it for all.
    digest = blake2b(repr(mine).encode()).hexdigest()
    first = group.all_gather_object(digest).index(digest) == group.rank
    found: Tensors = {}
    for rows in group.all_gather_object(mine if first else []):
        for dataset, kind, shape in rows:
            described = (kind, tuple(shape))
            assert found.setdefault(dataset, described) == described, (dataset, found[dataset], described)
    return dict(sorted(found.items()))


def _create(temporary: Path, tensors: Tensors, state: Mapping[str, Any]) -> None:
    """Lay the file out and take its space; alone, on rank 0."""
    rest = {name: value for name, value in state.items() if name != "deck"}
    texts = {STATE: json.dumps(rest, indent=1)} | ({DECK: state["deck"]} if state.get("deck") else {})
    needed = _needed(tensors, texts)
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        for left in temporary.parent.glob(".*.h5.tmp"):
            left.unlink()
        # HDF5 does not take errors of its own small writes well: look first.
        space = os.statvfs(temporary.parent)
        if space.f_bavail * space.f_frsize < needed:
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        _lay_out(temporary, tensors, texts)
        with temporary.open("r+b") as stream:
            os.posix_fallocate(stream.fileno(), 0, temporary.stat().st_size)
    except OSError as error:
        raise InputOutputError(
            f"{temporary}: cannot write a checkpoint of {format_bytes(needed)}: {describe(error)}"
        ) from None


def _needed(tensors: Tensors, texts: Mapping[str, str]) -> int:
    """Upper bound of the bytes of the file."""
    stored = sum(prod(shape) * np.dtype(STORED_AS[kind]).itemsize for kind, shape in tensors.values())
    sums = sum(8 * checksum.pieces(prod(shape)) for _, shape in tensors.values())
    text = sum(len(text.encode()) for text in texts.values())
    return stored + sums + text + len(tensors) * (_PAGE + _DESCRIPTION_BYTES) + (1 << 16)


def _lay_out(temporary: Path, tensors: Tensors, texts: Mapping[str, str]) -> None:
    """All datasets allocated, none filled; the texts and everything but the checksums in place.

    Object headers of this HDF5 version carry checksums, attributes of fixed length lie inside them.
    """
    with h5py.File(
        temporary,
        "w",
        libver=("v108", "v108"),
        locking=False,
        alignment_threshold=_PAGE,
        alignment_interval=_PAGE,
    ) as file:
        file.attrs["format"] = np.bytes_(FORMAT)
        file.attrs["version"] = VERSION
        file.attrs["versions"] = np.bytes_(json.dumps(library_versions()))
        file.attrs["piece"] = checksum.PIECE
        file.attrs["complete"] = 0
        for name, text in texts.items():
            stored = text.encode()
            dataset = file.create_dataset(
                name, data=np.array(stored, h5py.string_dtype("utf-8", len(stored)))
            )
            dataset.attrs["crc32"] = crc32(stored)
        first_piece = 0
        for name, (kind, shape) in tensors.items():
            dataset = _allocate(file, name, np.dtype(STORED_AS[kind]), shape)
            dataset.attrs["dtype"] = np.bytes_(kind)
            dataset.attrs["first_piece"] = first_piece
            first_piece += checksum.pieces(prod(shape))
        _allocate(file, CHECKSUMS, np.dtype("<u8"), (first_piece,)).attrs["crc32"] = 0


def _allocate(file: h5py.File, name: str, dtype: np.dtype[Any], shape: Index) -> h5py.Dataset:
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    link = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    link.set_create_intermediate_group(True)
    space = h5py.h5s.create_simple(shape)
    kind = h5py.h5t.py_create(dtype)
    return h5py.Dataset(h5py.h5d.create(file.id, name.encode(), kind, space, creation, link))


def _write_tensors(
    temporary: Path, group: Group, tensors: Tensors, entries: Sequence[Entry], call_bytes: int
) -> Sums:
    """Write what every rank holds; returns the checksums of all tensors, the same on all ranks."""
    chunks: dict[str, list[tuple[Entry, Block]]] = {name: [] for name in tensors}
    for entry in entries:
        part = entry.part(*entry.share())
        limit = max(1, call_bytes // part.values.element_size())
        chunks[entry.dataset] += [(part, cut) for block in blocks(part) for cut in block.cut(limit)]
    held = [sum(block.elements for _, block in mine) for mine in chunks.values()]
    for (name, (_, shape)), count in zip(
        tensors.items(), combined(group, np.array(held, np.int64)), strict=True
    ):
        assert count == prod(shape), f"{name}: the ranks hold {count} elements of {prod(shape)}"
    with together(group):
        # Seen by all ranks, or else it is not one shared folder; and then opening it would hang.
        temporary.stat()
    sums = []
    problems: list[str] = []
    file = _open_shared(temporary, group)
    try:
        for name, (kind, shape) in tensors.items():
            sums.append(checksum.seeds(name, kind, shape) if group.rank == 0 else checksum.zeros(shape))
            for part, block in chunks[name]:
                _write(file[name].id, part, block, sums[-1])
    except OSError as error:
        problems.append(f"{temporary}: cannot write {name}: {describe(error)}")
    except InputOutputError as error:  # of values that lie in a file
        problems += error.problems
    try:
        file.flush()
        file.close()
    except (OSError, RuntimeError) as error:
        problems.append(f"{temporary}: cannot be closed: {error}")
    with together(group):
        if problems:
            raise InputOutputError(problems[:1])
    return combined(group, np.concatenate(sums) if sums else checksum.zeros((0,))).view(np.uint64)


def _open_shared(temporary: Path, group: Group) -> h5py.File:
    if group.size == 1:
        return h5py.File(temporary, "r+", locking=False)
    return h5py.File(temporary, "r+", driver="mpio", comm=group.communicator)


def _write(dataset: h5py.h5d.DatasetID, entry: Entry, block: Block, sums: Sums) -> None:
    """One call of HDF5, of this rank alone, and the checksum of what it writes."""
    words = block.load(entry.values).contiguous().cpu().numpy().reshape(-1)
    checksum.add(sums, words.view(f"u{words.itemsize}"), block.start, block.shape, entry.shape)
    place = dataset.get_space()
    place.select_hyperslab(block.start, block.shape)
    dataset.write(h5py.h5s.create_simple((block.elements,)), place, words.view(dataset.dtype))


def _complete(temporary: Path, sums: Sums) -> None:
    """Put the checksums into the file and say that it is complete."""
    with h5py.File(temporary, "r+", locking=False) as file:
        if sums.size:
            file[CHECKSUMS][...] = sums
        file[CHECKSUMS].attrs.modify("crc32", crc32(sums.tobytes()))
        file.attrs.modify("complete", 1)


def _synchronize(path: Path) -> None:
    """Bring a file or folder, as this node knows it, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
