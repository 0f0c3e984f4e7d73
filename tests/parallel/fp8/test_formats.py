"""Numbers of 8 bits, and their scales, against numpy."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch

from hpctrain.parallel.fp8.formats import (
    E4M3,
    E5M2,
    Fp8Format,
    exponents_of,
    reducible_maximum,
    scales_of,
    scales_of_exponents,
    to_format,
    upcast,
)
from tests.parallel.fp8.given import Numbers, magnitudes, rounded

FORMS = pytest.mark.parametrize("form", [E4M3, E5M2], ids=["E4M3", "E5M2"])


def in_format(values: Numbers, form: Fp8Format) -> Numbers:
    return to_format(torch.from_numpy(values).float(), form).double().numpy()


def same(found: Numbers, expected: Numbers) -> None:
    """Bit for bit, zeros of both signs too."""
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found)[~np.isnan(found)], np.signbit(expected)[~np.isnan(found)])


@FORMS
def test_every_number_of_a_format_is_kept(form: Fp8Format) -> None:
    numbers = magnitudes(form)
    assert len(numbers) == (127 if form is E4M3 else 124)
    assert (form.largest, form.smallest) == (numbers[-1], numbers[1])
    codes = torch.arange(len(numbers), dtype=torch.uint8)
    for sign in (1, -1):
        same(in_format(sign * numbers, form), sign * numbers)
        stored = to_format(torch.from_numpy(sign * numbers).float(), form).view(torch.uint8)
        assert torch.equal(stored, codes + (0 if sign == 1 else 128))


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_is_expanded(form: Fp8Format, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).view(form.dtype)
    found = upcast(codes, dtype)
    assert found.dtype == dtype and found.shape == codes.shape
    numbers = magnitudes(form)
    flat = found.flatten().double().numpy()
    same(flat[: len(numbers)], numbers)
    same(flat[128 : 128 + len(numbers)], -numbers)
    assert not np.isfinite(np.delete(flat, [*range(len(numbers)), *range(128, 128 + len(numbers))])).any()


@FORMS
def test_what_lies_between_goes_to_the_nearest_and_ties_to_the_even(form: Fp8Format) -> None:
    numbers = magnitudes(form)
    ties = (numbers[1:] + numbers[:-1]) / 2
    found = in_format(ties, form)
    assert (found == numbers[1:]).sum() + (found == numbers[:-1]).sum() == len(ties)
    assert (np.searchsorted(numbers, found) % 2 == 0).all()
    near = [np.nextafter(ties.astype(np.float32), np.float32(to)).astype(np.float64) for to in (0, np.inf)]
    same(in_format(near[0], form), numbers[:-1])
    same(in_format(near[1], form), numbers[1:])


@FORMS
def test_any_numbers_are_rounded_as_numpy_rounds_them(form: Fp8Format) -> None:
    draw = np.random.default_rng(0)
    size = np.exp2(draw.uniform(np.log2(form.smallest) - 3, np.log2(form.largest) + 3, 100_000))
    values = (size * draw.choice([-1, 1], size.shape)).astype(np.float32).astype(np.float64)
    same(in_format(values, form), rounded(values, form))
    half = torch.from_numpy(values).bfloat16()
    same(to_format(half, form).double().numpy(), rounded(half.double().numpy(), form))


@FORMS
def test_what_is_too_large_is_the_largest_and_what_is_not_finite_stays_so(form: Fp8Format) -> None:
    most = form.largest
    beyond = np.array([most * 1.01, most * 1.07, most * 2, 1e30, 3.4e38, -most * 1.2, -1e38])
    same(in_format(beyond, form), np.copysign(most, beyond))
    assert np.isnan(in_format(np.array([np.inf, -np.inf, np.nan]), form)).all()
    zeros = np.array([0.0, -0.0, form.smallest / 2, -form.smallest / 2, form.smallest * 0.51])
    same(in_format(zeros, form), np.array([0.0, -0.0, 0.0, -0.0, form.smallest]))


@FORMS
def test_a_scale_is_the_least_power_of_two_that_is_enough(form: Fp8Format) -> None:
    powers = np.exp2(np.arange(-110.0, 127)).astype(np.float32)
    edges = powers * np.float32(1.75)  # the fraction of both formats' largest number
    random = np.random.default_rng(1).integers(1 << 23, 0x7F7FFFFF, 10_000, dtype=np.int32).view(np.float32)
    maxima = np.concatenate((powers, edges, np.nextafter(edges, np.float32(np.inf)), random))
    scales = scales_of(torch.from_numpy(maxima), form).double().numpy()
    assert (np.frexp(scales)[0] == 0.5).all()
    exact = maxima.astype(np.float64)
    enough, half = exact <= scales * form.largest, exact <= scales / 2 * form.largest
    assert enough.all()
    assert not (half & (scales > 2.0**-126)).any()
    assert (scales[len(powers) : 2 * len(powers)] == edges.astype(np.float64) / form.largest)[20:].all()
    tiny = torch.tensor([2.0**-149, 1e-40, 2.0**-126])
    assert scales_of(tiny, form).tolist() == [2.0**-126] * 3


def test_zeros_have_a_scale_and_what_is_not_finite_has_none() -> None:
    scales = scales_of(torch.tensor([0.0, torch.inf, torch.nan, 448.0]), E4M3)
    assert scales[[0, 3]].tolist() == [1.0, 1.0]
    assert bool(scales[1:3].isnan().all())


def test_a_maximum_is_the_same_in_any_order_of_ranks() -> None:
    found = set()
    for order in permutations([3.0, torch.nan, 448.5]):
        most = torch.tensor(0.0)
        for each in reducible_maximum(torch.tensor(order)):
            most = most if bool(most > each) else each  # as MPI compares, whatever NaN is
        found.add(float(most))
    assert found == {torch.inf}
    given = torch.tensor([torch.nan])
    reducible_maximum(given)
    assert given.isnan()


def test_exponents_are_bytes() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    powers = scales_of_exponents(every).double().numpy()
    assert np.array_equal(powers[:255], np.exp2(np.arange(-127.0, 128)))
    assert np.isnan(powers[255])
    assert torch.equal(exponents_of(scales_of_exponents(every)), every)
    if hasattr(torch, "float8_e8m0fnu"):
        assert torch.equal(
            every.view(torch.float8_e8m0fnu).float().nan_to_num(7), scales_of_exponents(every).nan_to_num(7)
        )
