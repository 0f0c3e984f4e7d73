"""Fit of rates to measured seconds, by least squares of relative errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpctrain.plan.time.machine_rates import AttentionRates, Efficiency, LinkRates, ProductPass, ProductRates

_LEAST_SHAPES = 3
"""Number of shapes of a pass from which its own efficiency is fitted."""


class ProductTime(NamedTuple):
    """Measured seconds of a product [m, k] by [k, n]."""

    kind: ProductPass
    m: int
    n: int
    k: int
    seconds: float

    @property
    def flops(self) -> float:
        """FLOPs of the product."""
        return 2.0 * self.m * self.n * self.k


def fit_products(times: Sequence[ProductTime]) -> ProductRates:
    """Return the rates for which `ProductRates.seconds` is closest to the measured seconds.

    The seconds are linear in 1/efficiency and saturation/efficiency. The peak is the largest measured FLOP/s.
    Passes with enough shapes have their own efficiency.
    """
    peak = max(each.flops / each.seconds for each in times)
    efficiency_of_all = _efficiency(times, peak)
    passes: dict[ProductPass, Efficiency] = {}
    for kind in dict.fromkeys(each.kind for each in times):
        pass_times = [each for each in times if each.kind == kind]
        if len({(each.m, each.n, each.k) for each in pass_times}) >= _LEAST_SHAPES:
            passes[kind] = _efficiency(pass_times, peak)
        else:
            passes[kind] = _scaled(efficiency_of_all, pass_times, peak)
    return ProductRates(
        peak=peak,
        efficiency=efficiency_of_all.efficiency,
        saturation=efficiency_of_all.saturation,
        passes=passes,
    )


def _efficiency(times: Sequence[ProductTime], peak: float) -> Efficiency:
    volume = [each.m * each.n * each.k / each.seconds for each in times]
    sides = [(each.n * each.k + each.m * each.k + each.m * each.n) / each.seconds for each in times]
    of_volume, of_sides = not_negative(volume, sides)
    of_volume = max(of_volume, 1e-3 / peak)  # 0 if all products are so small that only the sides matter
    return Efficiency(efficiency=2 / of_volume / peak, saturation=of_sides / of_volume)


def _scaled(efficiency_of_all: Efficiency, times: Sequence[ProductTime], peak: float) -> Efficiency:
    """Return the efficiency of all passes, scaled to a few measurements."""
    all_rates = ProductRates(
        peak=peak, efficiency=efficiency_of_all.efficiency, saturation=efficiency_of_all.saturation
    )
    ratios = [all_rates.seconds(each.m, each.n, each.k) / each.seconds for each in times]
    return Efficiency(
        efficiency=efficiency_of_all.efficiency * sum(ratios) / len(ratios),
        saturation=efficiency_of_all.saturation,
    )


def fit_link(sizes: Sequence[float], seconds: Sequence[float]) -> LinkRates:
    """Return the link for which `latency + bytes / bandwidth` is closest to the measured seconds."""
    inverse, latency = _with_rate(
        [size / time for size, time in zip(sizes, seconds, strict=True)], [1 / time for time in seconds]
    )
    return LinkRates(bandwidth=1 / inverse, latency=latency)


def fit_attention(times: Sequence[tuple[float, float, float, float]]) -> AttentionRates:
    """Return the rates of attention.

    Args:
        times: FLOPs forward, features of all queries, and seconds forward and backward of each measurement.
    """
    rates = []
    for direction, factor in ((0, 1), (1, 2)):
        flops = [factor * row[0] / row[2 + direction] for row in times]
        features = [row[1] / row[2 + direction] for row in times]
        inverse, rest = _with_rate(flops, features)
        rates.append((1 / inverse, rest))
    (forward, first), (backward, second) = rates
    return AttentionRates(forward=forward, backward=backward, features=(first, second))


def _with_rate(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the result of `not_negative`, with a positive first number.

    Measurements of a single size, or disturbed ones, may not separate both numbers.
    """
    inverse, rest = not_negative(first, second)
    if inverse > 0:
        return inverse, rest
    return not_negative(first, [0.0] * len(first))[0], 0.0


def not_negative(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return (a, b), both at least 0, for which `a first + b second` is closest to 1 in least squares."""
    x, y = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    scales = max(float(np.abs(x).max()), 1e-300), max(float(np.abs(y).max()), 1e-300)
    columns = np.stack((x / scales[0], y / scales[1]), axis=1)
    (a, b), *_ = np.linalg.lstsq(columns, np.ones(len(x)), rcond=None)
    if b < 0:
        a, b = _fit_one_column(columns[:, 0]), 0.0
    elif a < 0:
        a, b = 0.0, _fit_one_column(columns[:, 1])
    return float(a) / scales[0], float(b) / scales[1]


def _fit_one_column(column: np.ndarray) -> float:
    return float(column.sum() / (column**2).sum())
