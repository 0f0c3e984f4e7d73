"""Plan of an export: tensors and texts to write, and the datasets of the checkpoint to read."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.checkpoint.agree import first_difference
from hpctrain.checkpoint.checkpoint_index import CheckpointIndex, StoredTensor
from hpctrain.checkpoint.checksum import Sums
from hpctrain.checkpoint.exchange.safetensors_folder import NAMES, NewTensor
from hpctrain.checkpoint.tensor_ranges import Index
from hpctrain.checkpoint.tensor_source import TensorSource
from hpctrain.errors import HpctrainError
from hpctrain.model.precision import DTYPES

CopyTensor = Callable[[TensorSource, str, NDArray[Any], Sums], None]
"""Function that fills a tensor of a file, given its name and bits, and adds what it read to checksums."""


@dataclass(frozen=True)
class PreparedExport:
    """Export of one model.

    Attributes:
        tensors: Tensors of the files, in their order.
        texts: Contents of the other files, by name.
        sources: Datasets of the checkpoint that are read, each by its name in the model.
        copy: Function that fills one tensor of a file.
        description: The model in words.
        dtype: dtype of the exported weights.
        note: What the files leave out, in words; "" if they have the complete model.
    """

    tensors: Sequence[NewTensor]
    texts: dict[str, str]
    sources: Mapping[str, StoredTensor]
    copy: CopyTensor
    description: str
    dtype: torch.dtype
    note: str = ""


def export_dtype(structure: CheckpointIndex, dtype: str | None) -> torch.dtype:
    """Return the dtype of exported weights: `dtype`, such as "bf16", or that of the checkpoint."""
    if dtype is not None:
        return DTYPES[dtype]
    kinds = {stored.kind for name, stored in structure.datasets.items() if name.startswith("/model/")}
    kind = getattr(torch, kinds.pop()) if len(kinds) == 1 else torch.float32
    return kind if kind in NAMES else torch.float32


def convert_values(values: Tensor, dtype: torch.dtype, place: str) -> Tensor:
    """Return exported values in another dtype.

    Raises:
        HpctrainError: Values are beyond the range of fp16. The message begins with `place`.
    """
    converted = values.to(dtype)
    if dtype == torch.float16 and not torch.equal(converted.isfinite(), values.isfinite()):
        raise HpctrainError(f"{place}: has values beyond the range of fp16; use --dtype bf16 or fp32")
    return converted


def stored_sources(
    structure: CheckpointIndex, shapes: Mapping[str, Index], dtype: torch.dtype, exact: Container[str] = ()
) -> dict[str, StoredTensor]:
    """Return the dataset that is read for each one of a model: itself, or its master weights in fp32.

    Master weights are read if the export has another dtype than the model's weights in the checkpoint.

    Args:
        structure: The checkpoint.
        shapes: Shape of each dataset.
        dtype: dtype of the export.
        exact: Datasets for which master weights are read in any case.

    Raises:
        HpctrainError: Datasets are missing or have other shapes.
    """
    problems: list[str] = []
    sources: dict[str, StoredTensor] = {}
    for dataset, shape in shapes.items():
        stored = structure.datasets.get(dataset)
        if stored is None:
            problems.append(f"{structure.path}: {dataset}: not in this checkpoint")
            continue
        if getattr(torch, stored.kind) != dtype or dataset in exact:
            stored = structure.datasets.get(dataset.replace("/model/", "/master/", 1), stored)
        if stored.shape != (shape or (1,)):
            message = f"has shape {list(stored.shape)}, expected {list(shape)} by its deck"
            problems.append(f"{structure.path}: {stored.dataset}: {message}")
        sources[dataset] = stored
    if problems:
        raise first_difference(problems)
    return sources
