"""Reduction of curves to few points, with all extremes and averages of all values."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Middle = Literal["mean", "median"]


def extremes(values: Array, most: int) -> Indices:
    """Return ascending indices of the extremes of values [n].

    They are the first and the last index, and those of the lowest and the highest value in each section of
    equal length. If there are at most `most` values, they are all indices.

    Args:
        values: The values.
        most: Largest number of indices, 4 or more.
    """
    count = len(values)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(1, count - 1, (most - 2) // 2 + 1).astype(np.int64)
    kept = [0, count - 1]
    for start, end in pairwise(edges):
        stretch = values[start:end]
        kept += [int(start + stretch.argmin()), int(start + stretch.argmax())]
    return np.unique(kept)


def middles(values: Array, most: int, middle: Middle) -> tuple[Indices, Array]:
    """Return at most `most` ascending indices into values [n], and the average of the section around each."""
    edges = np.unique(np.linspace(0, len(values), min(most, len(values)) + 1).astype(np.int64))
    take = np.mean if middle == "mean" else np.median
    stretches = list(pairwise(edges))
    centres = np.array([(start + end - 1) // 2 for start, end in stretches], dtype=np.int64)
    return centres, np.array([take(values[start:end]) for start, end in stretches], dtype=np.float64)


def corners(positions: Array, values: Array, most: int) -> Indices:
    """Return indices between which a line through values [n] at ascending positions [n] is straight.

    The values between them can be interpolated. If there are more than `most` such indices, the result has
    `most` evenly distributed ones, which approximate the line.
    """
    if len(values) < 3:
        return np.arange(len(values))
    slopes = np.diff(values) / np.diff(positions)
    bends = 1 + np.flatnonzero(~np.isclose(slopes[1:], slopes[:-1], rtol=1e-9, atol=0))
    indices = np.array([0, *bends, len(values) - 1], dtype=np.int64)
    if len(indices) <= most:
        return indices
    return np.unique(np.linspace(0, len(values) - 1, most).astype(np.int64))
