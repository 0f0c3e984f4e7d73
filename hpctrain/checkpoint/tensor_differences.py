"""The difference of two checkpoints, tensor by tensor, read side by side in small pieces."""

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
from hpctrain.checkpoint.tensor_source import open_tensors
from hpctrain.comm.group import Group

# Elements of either file held at a time; with the copies that comparing makes, a few megabytes.
_PIECE = 1 << 16


@dataclass(frozen=True)
class TensorDifference:
    """How one tensor differs in two files: `differing` of its elements have other bits.

    `absolute` is the largest difference of two elements, `relative` the same over the largest finite
    element of both tensors; infinite where one of them is not finite.
    """

    dataset: str
    elements: int
    differing: int
    absolute: float
    relative: float


def comparable(one: CheckpointIndex, other: CheckpointIndex) -> list[str]:
    """Names of the datasets that have one type and shape in both files."""
    return [
        name
        for name, stored in one.datasets.items()
        if (there := other.datasets.get(name)) is not None
        and (stored.kind, stored.shape) == (there.kind, there.shape)
    ]


def compare(one: CheckpointIndex, other: CheckpointIndex, group: Group) -> list[TensorDifference]:
    """Every comparable tensor of two files, read by all ranks in shares; collective, the same on all.

    InputOutputError on all ranks where a file cannot be read. Checksums are not looked at.
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
    """Elements with other bits, the largest difference of two, the largest finite element of all."""
    one, other = words
    values = [_values(each, kind) for each in words]
    changed = one != other
    count = int(np.count_nonzero(changed))
    if not count:
        return 0, 0.0, _peak(values[0])
    mask = torch.from_numpy(changed)
    left, right = (each[mask].double() for each in values)
    gap = (left - right).abs()
    gap[left == right] = 0.0  # infinities of one sign with themselves cannot get here; zeros of two signs can
    largest = float(gap.max())
    return count, largest if isfinite(largest) else inf, max(map(_peak, values))


def _values(words: Words, kind: str) -> Tensor:
    """The elements, where their bits lie; truth values as numbers."""
    signed = torch.from_numpy(words.view(f"i{words.itemsize}"))
    return signed.view(torch.uint8 if kind == "bool" else getattr(torch, kind))


def _peak(values: Tensor) -> float:
    low, high = (float(bound) for bound in torch.aminmax(values))
    if isfinite(low) and isfinite(high):
        return max(abs(low), abs(high))
    finite = values[values.isfinite()]
    return _peak(finite) if finite.numel() else 0.0


def _over(absolute: float, peak: float) -> float:
    return absolute and (absolute / peak if peak else inf)
