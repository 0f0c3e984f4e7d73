"""Initial values of transformers, which depend on seed, tensor name and element index alone.

Weights are normal with standard deviation `initial_std`, divided by sqrt(2 layers) for those that end a
residual branch, as in GPT-2. Biases are zero, and norm weights one. `width_scaling` changes deviations with
the model's width. The first factor of an adapter has the deviation 1 / sqrt(3 inputs) of its authors' code,
and the second one is zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod, sqrt

import numpy as np
import torch
from torch import Tensor

from hpctrain.model.shape import ModelShape
from hpctrain.parallel.random import key_of, normal
from hpctrain.parallel.shards import Initial, Parameter, Shard

_CHUNK = 1 << 16
"""Number of elements that are drawn at a time."""


def fill_normal(target: Tensor, offset: int, shard: Shard, seed: int, deviation: float) -> None:
    """Fill a flat tensor with elements of this rank's piece of a normally distributed tensor.

    Args:
        target: Flat fp32 tensor to fill. What is beyond the end of the piece becomes zero.
        offset: Index of its first element in the flat local piece.
        shard: Shard of the tensor.
        seed: Seed of the run. An element depends on it, the tensor's name and the global index alone.
        deviation: Standard deviation.
    """
    key, width = key_of(seed, shard.name), prod(shard.local[1:])
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
    end = min(offset + target.numel(), rows.size * width)
    target.zero_()
    if end <= offset:
        return
    for first in range(offset // width // count * count, -(-end // width), count):
        chunk = rows[first : first + count]
        indices = chunk.reshape(-1, *(1,) * within.ndim) + within
        values = np.zeros((chunk.size, *shard.local[1:]), np.float32)
        index = (slice(None), *inside)
        values[index] = normal(key, indices) * deviation
        start = first * width
        low, high = max(start, offset), min(start + values.size, end)
        target[low - offset : high - offset] = torch.from_numpy(
            values.reshape(-1)[low - start : high - start]
        )


def deviation(shape: ModelShape, initial: Initial) -> float:
    """Return the standard deviation of initial weights of a role."""
    standard = shape.initial_std / sqrt(2 * shape.layers) if initial == "residual" else shape.initial_std
    return standard * shape.width_scaling.deviation(initial)


def initialize(
    targets: Iterable[tuple[Parameter, Tensor, int]], shape: ModelShape, seed: int, noise_std: float = 0.0
) -> None:
    """Fill flat fp32 tensors, each with elements of a parameter's local piece from an offset on.

    Padding is zero. `noise_std` is the standard deviation of noise on biases and norm weights, for checks.
    """
    for parameter, target, offset in targets:
        if parameter.initial not in ("ones", "zeros"):
            std = deviation(shape, parameter.initial)
            if parameter.initial == "adapter":
                std = 1 / sqrt(3 * parameter.shard.shape[1])
            fill_normal(target, offset, parameter.shard, seed, std)
            continue
        target.zero_()
        if noise_std:
            fill_normal(target, offset, parameter.shard, seed, noise_std)
        if parameter.initial == "ones":
            ones = target.new_ones(parameter.shard.local)
            parameter.shard.clear_padding(ones)
            target.add_(ones.flatten()[offset : offset + target.numel()])
