"""Initial values: functions of seed, tensor name and element index alone (design rule 1).

Weights are normal with standard deviation `initial_std`; those that end a residual branch are
divided by sqrt(2 layers), as in GPT-2. Biases are zero, norm weights one.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod, sqrt

import numpy as np
import torch
from torch import Tensor

from hpctrain.model.shape import ModelShape
from hpctrain.parallel.random import key_of, normal
from hpctrain.parallel.shard import Parameter, Shard

_CHUNK = 1 << 16


def _normal_piece(shard: Shard, seed: int, deviation: float) -> Tensor:
    """The local piece of a normal tensor [rows, ...], fp32 on the CPU, padding zero."""
    key, result = key_of(seed, shard.name), np.zeros(shard.local, np.float32)
    strides = [prod(shard.shape[dim + 1 :]) for dim in range(len(shard.shape))]
    rows, *others = (
        (np.arange(extent, dtype=np.uint64) + np.uint64(start)) * np.uint64(stride)
        for extent, start, stride in zip(shard.extent, shard.start, strides, strict=True)
    )
    within = np.zeros((), np.uint64)
    for offsets in others:
        within = within[..., None] + offsets
    inside = tuple(slice(0, extent) for extent in shard.extent[1:])
    count = max(1, _CHUNK // max(1, within.size))
    for first in range(0, rows.size, count):
        chunk = rows[first : first + count]
        indices = chunk.reshape(-1, *(1,) * within.ndim) + within
        here = (slice(first, first + chunk.size), *inside)
        result[here] = normal(key, indices) * deviation
    return torch.from_numpy(result)


def initialize(targets: Iterable[tuple[Parameter, Tensor]], shape: ModelShape, seed: int) -> None:
    """Fill each parameter's tensor (its master weights, of the local piece's shape); padding is zero."""
    deviations = {
        "normal": shape.initial_std,
        "residual": shape.initial_std / sqrt(2 * shape.layers),
    }
    for parameter, target in targets:
        if parameter.initial in deviations:
            target.copy_(_normal_piece(parameter.shard, seed, deviations[parameter.initial]))
        else:
            target.fill_(1.0 if parameter.initial == "ones" else 0.0)
