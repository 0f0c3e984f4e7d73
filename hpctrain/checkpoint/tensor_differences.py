"""Comparison of two checkpoints tensor by tensor. Both files are read in small pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np
import torch
from torch import Tensor

from hpctrain.checkpoint.agree import raise_on_all_ranks
from hpctrain.checkpoint.checkpoint_index import CheckpointIndex
from hpctrain.checkpoint.checksum import Words
from hpctrain.checkpoint.tensor_source import open_tensors, typed_values
from hpctrain.comm.group import Group

_PIECE = 1 << 16
"""Number of elements of each file that are in memory at a time."""


@dataclass(frozen=True)
class TensorDifference:
    """Difference of a tensor in two files.

    Attributes:
        dataset: Name of the tensor.
        elements: Number of its elements.
        differing: Number of elements whose bits differ.
        absolute: Largest absolute difference of two elements; infinite if a differing one is not finite.
        relative: `absolute` divided by the largest finite absolute value in both tensors.
    """

    dataset: str
    elements: int
    differing: int
    absolute: float
    relative: float


def comparable(one: CheckpointIndex, other: CheckpointIndex) -> list[str]:
    """Return the names of the datasets that have the same type and shape in both files."""
    return [
        name
        for name, stored in one.datasets.items()
        if (there := other.datasets.get(name)) is not None
        and (stored.kind, stored.shape) == (there.kind, there.shape)
    ]


def compare(one: CheckpointIndex, other: CheckpointIndex, group: Group) -> list[TensorDifference]:
    """Compare the comparable tensors of two files, and return their differences on all ranks. Collective.

    Each rank reads a share. Checksums are not compared.

    Raises:
        InputOutputError: A file cannot be read. All ranks raise it.
    """
    names = comparable(one, other)
    pieces = [
        (index, first)
        for index, name in enumerate(names)
        for first in range(0, one.datasets[name].elements, _PIECE)
    ]
    begin, end = (len(pieces) * rank // group.size for rank in (group.rank, group.rank + 1))
    counts = group.empty((len(names),), torch.int64).zero_()
    largest = group.empty((2, len(names)), torch.float64).zero_()
    with raise_on_all_ranks(group), open_tensors(one.path) as left, open_tensors(other.path) as right:
        buffers = np.empty((2, 8 * _PIECE), np.uint8)
        for index, first in pieces[begin:end]:
            here, there = (structure.datasets[names[index]] for structure in (one, other))
            count = min(_PIECE, here.elements - first)
            words = [
                left.read_elements(here, first, count, buffers[0]),
                right.read_elements(there, first, count, buffers[1]),
            ]
            differing, absolute, peak = _differ(words, here.kind)
            counts[index] += differing
            largest[0, index] = max(float(largest[0, index]), absolute)
            largest[1, index] = max(float(largest[1, index]), peak)
    group.all_reduce(counts)
    group.all_reduce(largest, "max")
    return [
        TensorDifference(name, one.datasets[name].elements, int(differing), absolute, _over(absolute, peak))
        for name, differing, absolute, peak in zip(
            names, counts.tolist(), largest[0].tolist(), largest[1].tolist(), strict=True
        )
    ]


def _differ(words: Sequence[Words], kind: str) -> tuple[int, float, float]:
    """Return the number of differing elements, their largest difference, and the largest finite value."""
    one, other = words
    values = [typed_values(each, kind) for each in words]
    changed = one != other
    count = int(np.count_nonzero(changed))
    if not count:
        return 0, 0.0, _peak(values[0])
    mask = torch.from_numpy(changed)
    left, right = (each[mask].double() for each in values)
    gap = (left - right).abs()
    gap[left == right] = 0.0  # zeros of different signs
    largest = float(gap.max())
    return count, largest if isfinite(largest) else inf, max(map(_peak, values))


def _peak(values: Tensor) -> float:
    """Return the largest finite absolute value; 0 if there is none."""
    low, high = (float(bound) for bound in torch.aminmax(values))
    if isfinite(low) and isfinite(high):
        return max(abs(low), abs(high))
    finite = values[values.isfinite()]
    return _peak(finite) if finite.numel() else 0.0


def _over(absolute: float, peak: float) -> float:
    """Return a difference divided by the largest value."""
    return absolute and (absolute / peak if peak else inf)
