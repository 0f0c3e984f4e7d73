"""Gradients of every rank that any rank can compute, and their sums by parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch

from hpctrain.comm.world import World
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.compression.matrices import factor_rank
from hpctrain.sharding.reducer import GradientReduction
from tests.engines import small_deck, trainer

Array = npt.NDArray[np.float32]
ODD = ("model.hidden=6", "model.heads=2")
"""Keys for parameters whose sizes are no multiples of a power of two, and smaller than a block."""


def buckets_of(world: World, *keys: str) -> list[Bucket]:
    """Return the buckets of a small deck."""
    return trainer(world, small_deck(*keys)).engine.stage.buckets


def given(name: str, length: int, rank: int, step: int) -> Array:
    """Return a rank's gradient of a parameter, of very different magnitudes and with zeros."""
    draw = np.random.default_rng([crc32(name.encode()), rank, step])
    values = draw.standard_normal(length).astype(np.float32) * np.float32(10.0 ** draw.integers(-3, 2))
    if "bias" in name and step % 2:
        values[::3] = 0
    if name == "final_norm.weight" and step < 4:
        values[:2] = 0  # whose first gradients come late
    return np.zeros(length, np.float32) if name == "final_norm.bias" else values


def fill(bucket: Bucket, rank: int, step: int) -> torch.Tensor:
    """Return a rank's gradients of a bucket."""
    flat = torch.zeros(bucket.length)
    for segment in bucket.segments:
        if segment.parameter.requires_grad:
            part = flat[segment.start : segment.start + segment.length]
            part.copy_(torch.from_numpy(given(segment.parameter.shard.name, segment.length, rank, step)))
    return flat


def summed(
    bucket: Bucket, reduction: GradientReduction, gradients: torch.Tensor, updates: int = 0
) -> dict[str, Array]:
    """Return the sums of the ranks' gradients by parameter: all elements, or those that this rank owns."""
    reduction.begin(updates)
    sums = reduction.start(gradients, own_of(bucket, gradients)).wait()
    assert not any(gradients[gap].any() for gap in bucket.layout.gaps)
    return {
        segment.parameter.shard.name: part.clone().numpy() for segment, part, _ in bucket.owned_segments(sums)
    }


def own_of(bucket: Bucket, gradients: torch.Tensor) -> torch.Tensor:
    """Return the memory of the sums, like a Reducer."""
    return gradients if bucket.sharding.zero == 0 else gradients[bucket.slice]


def own(bucket: Bucket, whole: dict[str, Array]) -> dict[str, Array]:
    """Return the elements of whole parameters that this rank owns."""
    flat = torch.zeros(bucket.length)
    for segment in bucket.segments:
        flat[segment.start : segment.start + segment.length] = torch.from_numpy(
            whole[segment.parameter.shard.name]
        )
    return {
        s.parameter.shard.name: part.numpy() for s, part, _ in bucket.owned_segments(flat[bucket.owned_slice])
    }


def message_elements(shapes: Iterable[Sequence[int]], rank: int) -> tuple[int, int]:
    """Return the number of elements that a rank sends in each of the two all-reduces.

    Vectors, and matrices whose factors would not be smaller, are sent in full in the first one.

    Args:
        shapes: Shapes of the tensors; all dims but the first are columns of a matrix.
        rank: Largest number of columns of factors.
    """
    first = second = 0
    for shape in shapes:
        n, m = shape[0], prod(shape[1:])
        columns = factor_rank(n, m, rank) if len(shape) > 1 else 0
        first += n * (columns or m)
        second += m * columns
    return first, second
