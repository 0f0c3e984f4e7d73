"""Planned steps beside published ones, of up to 12,288 GPUs.

Tests of plan/time/step.py, plan/time/layers.py and the machines of plan/time/machines/. What machines are
fitted to is marked in the files; the other rows are predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from hpctrain.plan.time.machine import Machine
from tests.plan.time.published import (
    Published,
    fitted,
    machine,
    megascale_2024,
    megatron_deepspeed,
    recompute_2022,
    selene,
)

ERRORS = {selene: ("selene-2021", 0.04, 0.08), recompute_2022: ("selene-2022", 0.05, 0.10)}
ERRORS |= {megascale_2024: ("megascale-2024", 0.05, 0.10)}
"""Of the rows that are predicted, as a share of what was measured: the mean, and the largest."""


def within(rows: Iterable[Published], rates: Machine, mean: float, largest: float, *without: str) -> bool:
    errors = [abs(row.error(rates, *without)) for row in rows if not row.fitted]
    return fmean(errors) <= mean and max(errors) <= largest


@pytest.mark.parametrize("table", ERRORS, ids=lambda table: table.__name__)
def test_rows_that_nothing_was_fitted_to_are_predicted(table: Callable[[], Iterable[Published]]) -> None:
    name, mean, largest = ERRORS[table]
    rates = machine(name)
    for row in table():
        if not row.fitted:
            print(f"{row.name}: {100 * row.error(rates):+.1f}%")
    assert within(table(), rates, mean, largest)


@pytest.mark.parametrize("table", [recompute_2022, megascale_2024], ids=lambda table: table.__name__)
def test_one_number_is_that_of_the_row_it_is_fitted_to(table: Callable[[], Iterable[Published]]) -> None:
    rates = machine(ERRORS[table][0])
    (row,) = [row for row in table() if row.fitted]
    assert row.error(rates) == pytest.approx(0, abs=1e-3)
    refitted = fitted(rates, row).products_of("fp16").efficiency
    assert refitted == pytest.approx(rates.products_of("fp16").efficiency, rel=1e-3)


def test_a_model_is_predicted_from_three_others() -> None:
    """66 layouts on one cluster, in the mean over all that were left out, and with what the preset has."""
    rates, rows = machine("megatron-deepspeed-a100"), list(megatron_deepspeed())
    assert fmean(abs(row.error(rates)) for row in rows) < 0.085
    parts, measured = np.array([linear(row, rates) for row in rows]), np.array([row.measured for row in rows])
    errors = []
    for left_out in sorted({row.name for row in rows}):
        others = np.array([row.name != left_out for row in rows])
        one, two = least_deviations(parts[others], measured[others])
        planned = parts[~others] @ (1, one, two)
        errors += list(np.abs(planned / measured[~others] - 1))
    assert len(errors) == len(rows)
    assert fmean(errors) < 0.10


def linear(row: Published, rates: Machine) -> tuple[float, float, float]:
    """(a, b, c), where a step takes a + b / efficiency + c saturation / efficiency seconds."""

    def seconds(efficiency: float, saturation: float) -> float:
        products = rates.products_of("fp16")
        changed = products.model_copy(update={"efficiency": efficiency, "saturation": saturation})
        return sum(row.causes(rates.model_copy(update={"products": {"fp16": changed}})).values())

    once, twice, saturated = seconds(1.0, 0.0), seconds(0.5, 0.0), seconds(1.0, 100.0)
    return 2 * once - twice, twice - once, (saturated - once) / 100


def least_deviations(parts: np.ndarray, measured: np.ndarray) -> tuple[float, float]:
    """1 / efficiency and saturation / efficiency by which the errors' sizes have the least sum."""
    factors, rest = parts[:, 1:] / measured[:, None], 1 - parts[:, 0] / measured
    weights = np.ones(len(measured))
    for _ in range(60):
        root = np.sqrt(weights)
        (one, two), *_ = np.linalg.lstsq(factors * root[:, None], rest * root, rcond=None)
        weights = 1 / np.maximum(np.abs(factors @ (one, two) - rest), 0.01)
    return float(one), float(two)


@pytest.mark.parametrize("cause", ["bubble", "gradients", "tensor"])
def test_a_model_without_a_cause_misses_a_bound(cause: str) -> None:
    """Though it is fitted anew to the same rows."""
    rates = machine("megascale-2024")
    (row,) = [row for row in megascale_2024() if row.fitted]
    anew = fitted(rates, row, cause)
    missed = not within(megascale_2024(), anew, 0.05, 0.10, cause)
    missed |= not within(selene(), machine("selene-2021"), 0.04, 0.08, cause)
    assert missed


def test_a_model_without_interleaving_misses_a_bound() -> None:
    """Whose stages hold one part each."""

    def plain(row: Published) -> Published:
        return replace(row, deck=row.deck.with_keys(layout={"schedule": "1f1b", "chunks": 1}))

    rates = machine("selene-2022")
    assert within(recompute_2022(), rates, 0.05, 0.10)
    assert not within(map(plain, recompute_2022()), rates, 0.05, 0.10)
