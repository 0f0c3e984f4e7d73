"""Creation of a checkpoint file before tensors are written, and its completion afterwards, by one rank.

The file has a temporary name. All its space is allocated at once, so that a full disk is an error before
tensors are written. The offsets of datasets are known from then on and do not change.
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
    DTYPE_NAMES,
    FORMAT,
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

_PAGE = 4096
"""Alignment in bytes of datasets with at least this size."""

_DESCRIPTION_BYTES = 2048
"""Upper bound of the bytes that HDF5 stores for a dataset in addition to its elements."""

_TEMPORARY_STEP = re.compile(r"\.step-\d{8,}\.h5\.tmp")
"""Temporary names of the checkpoints of a run, which saves one at a time."""

Tensors = dict[str, tuple[str, Index]]
"""Name of the dtype and global shape of each dataset by name, in sorted order."""


def temporary_name(path: Path) -> Path:
    """Return the name that a checkpoint has while it is written."""
    return path.with_name(f".{path.name}.tmp")


def create(temporary: Path, tensors: Tensors, state: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Create a file with all metadata but without elements and checksums, and return its datasets.

    Temporary files of saves that were interrupted are deleted.

    Args:
        temporary: Temporary name of the file.
        tensors: dtypes and shapes of the datasets.
        state: Training state.

    Raises:
        InputOutputError: The file cannot be created, for example since the disk is full.
    """
    rest = {name: value for name, value in state.items() if name != "deck"}
    texts = {STATE: json.dumps(rest, indent=1)} | ({DECK: state["deck"]} if state.get("deck") else {})
    needed_bytes = _file_bytes(tensors, texts)
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(temporary):
            temporary.unlink()
        if _TEMPORARY_STEP.fullmatch(temporary.name):
            with suppress(OSError):  # they do not prevent this save
                delete_files(temporary.parent, files_named(_TEMPORARY_STEP.pattern))
        # HDF5 may crash if one of its own small writes fails, so the free space is checked first.
        space = os.statvfs(temporary.parent)
        if space.f_bavail * space.f_frsize < needed_bytes:
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        datasets = _create_datasets(temporary, tensors, texts)
        with temporary.open("r+b") as stream:
            os.posix_fallocate(stream.fileno(), 0, temporary.stat().st_size)
    except OSError as error:
        refused = f"{temporary}: cannot write a checkpoint of {format_bytes(needed_bytes)}"
        raise InputOutputError(f"{refused}: {error_reason(error)}") from None
    return datasets


def complete(temporary: Path, sums: Sums) -> None:
    """Write the checksums, and mark the file as complete."""
    with open_for_writing(temporary, "r+") as file:
        if sums.size:
            file[CHECKSUMS][...] = sums
        file[CHECKSUMS].attrs.modify("crc32", crc32(sums.tobytes()))
        file.attrs.modify("complete", 1)


def _file_bytes(tensors: Tensors, texts: Mapping[str, str]) -> int:
    """Return an upper bound of the size of the file in bytes."""
    stored = sum(prod(shape) * np.dtype(STORED_AS[kind]).itemsize for kind, shape in tensors.values())
    sums = sum(8 * checksum.pieces(prod(shape)) for _, shape in tensors.values())
    text = sum(len(text.encode()) for text in texts.values())
    return stored + sums + text + len(tensors) * (_PAGE + _DESCRIPTION_BYTES) + (1 << 16)


def _create_datasets(temporary: Path, tensors: Tensors, texts: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Write texts and attributes, allocate all datasets, and return them.

    The metadata is that of HDF5 1.8, whose object headers have checksums. These cover attributes of fixed
    length.
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
            if DTYPE_NAMES.get(dtype) != kind:
                _add_attribute(dataset, DTYPE.encode(), np.array(kind.encode()))
            offset = dataset.get_offset() if prod(shape) else 0
            datasets[name] = StoredTensor(name, kind, shape, int(offset), first_piece)
            first_piece += checksum.pieces(prod(shape))
        _add_attribute(_allocate(file, CHECKSUMS, np.dtype("<u8"), (first_piece,)), b"crc32", np.array(0))
    return datasets


def _allocate(file: h5py.File, name: str, dtype: np.dtype[Any], shape: Index) -> h5py.h5d.DatasetID:
    space = h5py.h5s.create_simple(shape)
    return h5py.h5d.create(file.id, name.encode(), h5py.h5t.py_create(dtype), space, *_creation_lists())


def _add_attribute(dataset: h5py.h5d.DatasetID, name: bytes, value: NDArray[Any]) -> None:
    """Add an attribute to a dataset through the low-level interface of h5py, which is faster."""
    kind, space = h5py.h5t.py_create(value.dtype, logical=True), h5py.h5s.create(h5py.h5s.SCALAR)
    h5py.h5a.create(dataset, name, kind, space).write(value)


@cache
def _creation_lists() -> tuple[h5py.h5p.PropDCID, h5py.h5p.PropLCID]:
    """Return the property lists of datasets: contiguous, allocated at once, without fill values."""
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    link = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    link.set_create_intermediate_group(True)
    return creation, link
