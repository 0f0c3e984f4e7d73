"""The order of the samples against its definition: a permutation per epoch, stable, without pattern."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.order import Integers, SampleOrder


def consecutive(order: SampleOrder, start: int, count: int) -> Integers:
    return order.at(np.arange(start, start + count, dtype=np.int64))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 1000, 4096, 4097])
@pytest.mark.parametrize("epoch", [0, 1, 12345])
def test_every_epoch_has_every_sequence_once(count: int, epoch: int) -> None:
    samples = consecutive(SampleOrder(count, seed=5), epoch * count, count)
    assert samples.dtype == np.int64
    assert np.array_equal(np.sort(samples), np.arange(count))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3000), st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_any_count_seed_and_epoch(count: int, seed: int, epoch: int) -> None:
    samples = consecutive(SampleOrder(count, seed), epoch * count, count)
    assert np.array_equal(np.sort(samples), np.arange(count))


def test_a_sample_depends_on_its_position_alone() -> None:
    order = SampleOrder(100, seed=3)
    run = consecutive(order, 0, 350)
    assert [int(consecutive(order, i, 1)[0]) for i in range(0, 350, 7)] == run[::7].tolist()
    assert np.array_equal(consecutive(order, 95, 10), run[95:105])  # over the end of an epoch
    assert np.array_equal(order.at(np.array([300, 5, 99])), run[[300, 5, 99]])


def test_the_order_never_changes() -> None:
    """Written down once: a checkpoint's sample position must mean the same in every version."""
    order = SampleOrder(1000, seed=42)
    assert consecutive(order, 0, 6).tolist() == [50, 742, 955, 789, 307, 704]
    assert consecutive(order, 1000, 6).tolist() == [969, 124, 211, 47, 758, 673]
    assert consecutive(SampleOrder(10**12, seed=7), 10**13, 3).tolist() == [
        36469638979,
        234408935460,
        885350093910,
    ]


def test_epochs_and_seeds_differ() -> None:
    first = consecutive(SampleOrder(1000, 1), 0, 1000)
    for other in (consecutive(SampleOrder(1000, 1), 1000, 1000), consecutive(SampleOrder(1000, 2), 0, 1000)):
        assert np.sum(first == other) < 10  # one place in a thousand agrees by chance


def test_no_pattern_is_seen() -> None:
    count = 100_000
    samples = consecutive(SampleOrder(count, seed=9), 0, count).astype(float)
    noise = 5 / np.sqrt(count)
    assert abs(np.corrcoef(samples, np.arange(count))[0, 1]) < noise
    for lag in (1, 2, 316, 317):  # 317 is the side of the network's square
        assert abs(np.corrcoef(samples[:-lag], samples[lag:])[0, 1]) < noise
    quarters = np.histogram2d(np.arange(count), samples, bins=10)[0]
    assert np.sum((quarters - 1000) ** 2 / 1000) < 150  # chi-square of 81 degrees, 99.999% below 148


@pytest.mark.parametrize("count", [2, 3, 4])
def test_small_permutations_are_equally_likely(count: int) -> None:
    epochs, kinds = 4800, {2: 2, 3: 6, 4: 24}[count]
    table = consecutive(SampleOrder(count, seed=1), 0, epochs * count).reshape(epochs, count)
    numbers = np.unique(table, axis=0, return_counts=True)[1]
    expected = epochs / kinds
    assert len(numbers) == kinds
    assert np.sum((numbers - expected) ** 2 / expected) < 60
