"""Lay a checkpoint file out before a tensor is written, and complete it afterwards; alone, on one rank.

The file has a temporary name and takes its space on the disk at once, so that a full disk shows before
any tensor is written. Where each dataset's bytes will lie is then known and never changes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from errno import ENOSPC
from functools import cache
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint import checksum
from hpctrain.checkpoint.checkpoint_index import (
    CHECKSUMS,
    DECK,
    DTYPE,
    FORMAT,
    NAMED,
    STATE,
    VERSION,
    StoredTensor,
)
from hpctrain.checkpoint.checksum import Sums
from hpctrain.checkpoint.tensor_ranges import STORED_AS, Index
from hpctrain.checkpoint.versions import library_versions
from hpctrain.comm.error_messages import error_reason
from hpctrain.errors import InputOutputError
from hpctrain.files import delete_files, files_named
from hpctrain.hdf5 import open_for_writing
from hpctrain.units import format_bytes

# Datasets of a page or more start at one; the space this takes is counted with the file's.
_PAGE = 4096
# Bound of what HDF5 itself stores for one dataset with its attributes and links.
_DESCRIPTION_BYTES = 2048

# A run saves one checkpoint at a time.
_OF_A_STEP = re.compile(r"\.step-\d{8,}\.h5\.tmp")

# Element type and global shape of every dataset, by name, in sorted order.
Tensors = dict[str, tuple[str, Index]]


def temporary_name(path: Path) -> Path:
    """The name a checkpoint has while it is written."""
    return path.with_name(f".{path.name}.tmp")


def create(temporary: Path, tensors: Tensors, state: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Make the file, with everything but tensors and checksums, and tell the datasets' places.

    What crashed saves have left goes: a file of this name and, of a run's checkpoint, those of other steps.
    InputOutputError where the disk refuses.
    """
    rest = {name: value for name, value in state.items() if name != "deck"}
    texts = {STATE: json.dumps(rest, indent=1)} | ({DECK: state["deck"]} if state.get("deck") else {})
    needed = _needed(tensors, texts)
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(temporary):
            temporary.unlink()
        if _OF_A_STEP.fullmatch(temporary.name):
            with suppress(OSError):  # they only take room
                delete_files(temporary.parent, files_named(_OF_A_STEP.pattern))
        # HDF5 does not take errors of its own small writes well: look first.
        space = os.statvfs(temporary.parent)
        if space.f_bavail * space.f_frsize < needed:
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        datasets = _lay_out(temporary, tensors, texts)
        with temporary.open("r+b") as stream:
            os.posix_fallocate(stream.fileno(), 0, temporary.stat().st_size)
    except OSError as error:
        refused = f"{temporary}: cannot write a checkpoint of {format_bytes(needed)}"
        raise InputOutputError(f"{refused}: {error_reason(error)}") from None
    return datasets


def complete(temporary: Path, sums: Sums) -> None:
    """Put the checksums into the file and say that it is complete."""
    with open_for_writing(temporary, "r+") as file:
        if sums.size:
            file[CHECKSUMS][...] = sums
        file[CHECKSUMS].attrs.modify("crc32", crc32(sums.tobytes()))
        file.attrs.modify("complete", 1)


def _needed(tensors: Tensors, texts: Mapping[str, str]) -> int:
    """Upper bound of the bytes of the file."""
    stored = sum(prod(shape) * np.dtype(STORED_AS[kind]).itemsize for kind, shape in tensors.values())
    sums = sum(8 * checksum.pieces(prod(shape)) for _, shape in tensors.values())
    text = sum(len(text.encode()) for text in texts.values())
    return stored + sums + text + len(tensors) * (_PAGE + _DESCRIPTION_BYTES) + (1 << 16)


def _lay_out(temporary: Path, tensors: Tensors, texts: Mapping[str, str]) -> dict[str, StoredTensor]:
    """All datasets allocated, none filled; the texts and everything but the checksums in place.

    Object headers of this HDF5 version carry checksums, attributes of fixed length lie inside them.
    """
    datasets = {}
    with open_for_writing(
        temporary,
        "w",
        libver=("v108", "v108"),
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
            dtype = np.dtype(STORED_AS[kind])
            dataset = _allocate(file, name, dtype, shape)
            if NAMED.get(dtype) != kind:
                _attach(dataset, DTYPE.encode(), np.array(kind.encode()))
            offset = dataset.get_offset() if prod(shape) else 0
            datasets[name] = StoredTensor(name, kind, shape, int(offset), first_piece)
            first_piece += checksum.pieces(prod(shape))
        _attach(_allocate(file, CHECKSUMS, np.dtype("<u8"), (first_piece,)), b"crc32", np.array(0))
    return datasets


def _allocate(file: h5py.File, name: str, dtype: np.dtype[Any], shape: Index) -> h5py.h5d.DatasetID:
    space = h5py.h5s.create_simple(shape)
    return h5py.h5d.create(file.id, name.encode(), h5py.h5t.py_create(dtype), space, *_creation_lists())


def _attach(dataset: h5py.h5d.DatasetID, name: bytes, value: NDArray[Any]) -> None:
    """Give a dataset an attribute, as h5py does, without the time that its objects take."""
    kind, space = h5py.h5t.py_create(value.dtype, logical=True), h5py.h5s.create(h5py.h5s.SCALAR)
    h5py.h5a.create(dataset, name, kind, space).write(value)


@cache
def _creation_lists() -> tuple[h5py.h5p.PropDCID, h5py.h5p.PropLCID]:
    """How a dataset is laid out: at once, in one range, unfilled; its folders are made with it."""
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    link = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    link.set_create_intermediate_group(True)
    return creation, link
