"""Curves of few points that look as those of many: extremes stay, and averages are of all that was there."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Middle = Literal["mean", "median"]


def extremes(values: Array, most: int) -> Indices:
    """At most `most` (4 or more) indices into values [n], rising: the first and the last, and of each stretch
    of equal length where its lowest and highest values are. All of them where they are no more.
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
    """At most `most` indices into values [n], rising, and the average of the stretch around each."""
    edges = np.unique(np.linspace(0, len(values), min(most, len(values)) + 1).astype(np.int64))
    take = np.mean if middle == "mean" else np.median
    stretches = list(pairwise(edges))
    centres = np.array([(start + end - 1) // 2 for start, end in stretches], dtype=np.int64)
    return centres, np.array([take(values[start:end]) for start, end in stretches], dtype=np.float64)


def corners(places: Array, values: Array, most: int) -> Indices:
    """Indices of a line through values [n] at rising places [n] between which it is straight, so that others
    are found again between them: at most `most`, which then are near to the line.
    """
    if len(values) < 3:
        return np.arange(len(values))
    slopes = np.diff(values) / np.diff(places)
    bends = 1 + np.flatnonzero(~np.isclose(slopes[1:], slopes[:-1], rtol=1e-9, atol=0))
    found = np.array([0, *bends, len(values) - 1], dtype=np.int64)
    if len(found) <= most:
        return found
    return np.unique(np.linspace(0, len(values) - 1, most).astype(np.int64))
