"""Curve in a line of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"
LETTERS = "_.-~=+*#"
"""Marks for terminals without Unicode."""


def sparkline(values: Sequence[float], width: int, marks: str = BLOCKS) -> str:
    """Return at most `width` marks for the finite values, each for the mean of some of them."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [len(values) * place // count for place in range(count + 1)]
    means = [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return marks[0] * count
    most = len(marks) - 1
    return "".join(marks[round((mean - low) / (high - low) * most)] for mean in means)
