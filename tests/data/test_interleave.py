"""Shares against their definition at every prefix, and any place of the order against all before it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from hpctrain.data.interleave import _CACHED_BLOCKS, Interleaving
from hpctrain.data.order import Integers


def shares_of(weights: list[float]) -> list[Fraction]:
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def consecutive(shares: list[Fraction], seed: int, count: int) -> Integers:
    return Interleaving(shares, seed).at(np.arange(count))[0]


def require_shares(source: Integers, shares: list[Fraction]) -> None:
    """Of any number of first samples every source has its share, to less than one sample."""
    for number, share in enumerate(shares):
        had = np.cumsum(source == number)
        ideal = np.arange(1, len(source) + 1) * share.numerator
        assert np.abs(had * share.denominator - ideal).max() < share.denominator


weights = some.lists(
    some.one_of(some.integers(1, 50), some.floats(0.01, 1).map(lambda x: round(x, 5))), min_size=1, max_size=9
)


@settings(max_examples=25, deadline=None)
@given(weights, some.integers(0, 2**63 - 1))
def test_shares_are_exact_to_a_sample_at_every_prefix(weights: list[float], seed: int) -> None:
    shares = shares_of(weights)
    require_shares(consecutive(shares, seed, 3000), shares)


@pytest.mark.parametrize(
    "weights",
    [[9, *[0.1] * 10], [1] * 33, [0.5, 0.3, 0.2], [99.9, 0.1], [13571113, 2718281, 314159], [1 / 3, 2 / 3]],
)
def test_one_large_and_many_small_and_what_no_period_holds(weights: list[float]) -> None:
    shares = shares_of(weights)
    require_shares(consecutive(shares, 1, 5000), shares)


@settings(max_examples=25, deadline=None)
@given(weights, some.integers(0, 2**63 - 1), some.integers(0, 6000))
def test_a_place_follows_from_its_number_alone(weights: list[float], seed: int, place: int) -> None:
    """What is begun shortly before a place comes to the choices that are made from the beginning."""
    shares = shares_of(weights)
    source = Interleaving(shares, seed)._choose(0, 7000, [0] * len(shares))
    before = [int(np.sum(source[:place] == number)) for number in range(len(shares))]
    assert Interleaving(shares, seed).counts(place) == before
    alone, nth = Interleaving(shares, seed).at(np.array([place]))
    assert alone[0] == source[place] and nth[0] == before[source[place]]


@pytest.mark.parametrize(
    ("weights", "seed"),
    [
        ([27, 6, 24, 26, 22, 28, 10], 1),
        ([12, 18, 30, 15, 17, 9, 29, 2, 28, 1], 4),
        ([15, 30, 11, 30, 13, 14, 29], 5),
    ],
)
def test_what_came_before_is_chosen_again_where_dates_alone_do_not_tell(
    weights: list[float], seed: int
) -> None:
    """Of these, a sample has come before one that has to come sooner, which might not come yet then."""
    shares = shares_of(weights)
    source = Interleaving(shares, seed)._choose(0, 600, [0] * len(shares))
    before = [np.bincount(source[:place], minlength=len(shares)).tolist() for place in range(600)]
    order, hasty = Interleaving(shares, seed), Interleaving(shares, seed)
    hasty.back = 0
    assert [order._counts_from_earlier(place) for place in range(600)] == before
    assert [hasty._counts_from_earlier(place) for place in range(600)] != before


def test_any_order_of_asking_and_far_away() -> None:
    shares = shares_of([0.7, 0.2, 0.0991, 0.0009])
    order = Interleaving(shares, 3)
    far = 10**12 + np.arange(4000)
    source, nth = order.at(far[::-1].copy())
    assert np.array_equal(Interleaving(shares, 3).at(far)[0], source[::-1])
    for number, share in enumerate(shares):
        taken = nth[::-1][source[::-1] == number]
        assert np.array_equal(taken, taken[0] + np.arange(len(taken)))
        assert abs(taken[0] - 10**12 * share) < 1 + 4000 * share
    counts = order.counts(10**12)
    assert sum(counts) == 10**12
    assert all(abs(count - 10**12 * share) < 1 for count, share in zip(counts, shares, strict=True))


def test_ranks_in_turns_have_no_source_each() -> None:
    """Of two of one weight each pair is in an order of its own; another seed has another one."""
    source = consecutive(shares_of([1, 1]), 5, 4000)
    assert 900 < source[::2].sum() < 1100
    assert np.array_equal(source[::2] + source[1::2], np.ones(2000))
    assert not np.array_equal(source, consecutive(shares_of([1, 1]), 6, 4000))


def test_the_order_never_changes() -> None:
    """Written down once: a checkpoint's sample position must mean the same in every version."""
    first = consecutive(shares_of([5, 3, 2]), 42, 20).tolist()
    assert first == [0, 1, 0, 2, 0, 1, 0, 2, 1, 0, 0, 1, 0, 2, 0, 1, 0, 1, 0, 2]


def test_no_more_blocks_are_kept_than_a_step_and_the_next_need() -> None:
    """However long it goes, or wherever it is asked for; what was let go comes again as it was."""
    order = Interleaving(shares_of([5, 3, 1]), 7)
    first = order.at(np.arange(3000))
    for place in (*range(0, 60_000, 1000), 10_000_000, 5):
        order.at(np.arange(place, place + 10))
    assert len(order._blocks) <= _CACHED_BLOCKS
    again = order.at(np.arange(3000))
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
