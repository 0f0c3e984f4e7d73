"""Fingerprint of the weights that `model.from` names, which is cheap to compute even for large models.

The fingerprint of a checkpoint consists of the checksums that it stores. Files of safetensors store none, so
that of a folder consists of a few rows of each tensor: training changes all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import torch

from hpctrain.checkpoint.checkpoint_index import examine
from hpctrain.checkpoint.exchange.safetensors_folder import TensorFolder, open_folder
from hpctrain.sharding.state import MASTER, MODEL

_ROWS = 8
"""Number of rows that are read of each tensor, from the first to the last."""


def source_fingerprint(path: Path) -> str:
    """Return the fingerprint of the weights of a checkpoint or a Hugging Face folder, 16 hexadecimal digits.

    Raises:
        HpctrainError: There are no weights, or they cannot be read.
    """
    parts = _folder_parts(open_folder(path)) if path.is_dir() else _checkpoint_parts(path)
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _checkpoint_parts(path: Path) -> Iterator[bytes]:
    """Yield the names, shapes and checksums of the weights in a checkpoint."""
    structure = examine(path)
    for name, stored in sorted(structure.datasets.items()):
        if name.startswith((f"/{MODEL}/", f"/{MASTER}/")):
            yield f"{name} {stored.shape}".encode()
            yield structure.sums[stored.pieces].tobytes()


def _folder_parts(folder: TensorFolder) -> Iterator[bytes]:
    """Yield the names, types and shapes of all tensors of a folder, each with some of its rows."""
    for name, described in sorted(folder.tensors.items()):
        shape = described.shape
        yield f"{name} {described.kind} {shape}".encode()
        if not shape:
            yield _bytes(folder.read(name, (), ()))
            continue
        rows = min(_ROWS, shape[0])
        for number in range(rows):
            first = number * (shape[0] - 1) // max(1, rows - 1)
            yield _bytes(folder.read(name, (first, *[0] * (len(shape) - 1)), (1, *shape[1:])))


def _bytes(values: torch.Tensor) -> bytes:
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
