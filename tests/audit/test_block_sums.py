"""Block sums and word sums against exact arithmetic. Tests of audit/block_sums.py and audit/bits.py."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import fsum

import pytest
import torch
from torch import Tensor

from hpctrain.audit.bits import COPIES, majority, word_sum
from hpctrain.audit.block_sums import absolute_sum, block_elements, block_sums, exact_sum, rounding_bounds

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def third(count: int) -> Tensor:
    """Equal numbers, whose rounding errors add up."""
    return torch.full((count,), 1 / 3, dtype=torch.float64)


def growing(count: int) -> Tensor:
    """One large number first, which swallows all that follow."""
    values = torch.full((count,), 1e-4, dtype=torch.float64)
    values[0] = 4096.0
    return values


def alternating(count: int) -> Tensor:
    """What nearly cancels."""
    return torch.randn(count, dtype=torch.float64) * (-1.0) ** torch.arange(count) + 10 * (
        (-1.0) ** torch.arange(count)
    )


def tiny(count: int) -> Tensor:
    """Numbers whose squares vanish."""
    return torch.randn(count, dtype=torch.float64) * 1e-30


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("make", [third, growing, alternating, tiny, torch.randn])
def test_rounding_errors_are_within_half_of_the_bounds(
    dtype: torch.dtype, make: Callable[[int], Tensor]
) -> None:
    """This holds for full blocks and for a shorter last block."""
    torch.manual_seed(3)
    block = block_elements(1, dtype)
    values = make(2 * block + 12_345).to(dtype)
    sums, _ = block_sums(values, block, is_input=True)
    out, _ = block_sums(values, block, is_input=False)
    assert torch.equal(sums[:, 0], out[:, 0]) and len(sums) == (
        3 if dtype not in {*FLOATS[2:]} else len(sums)
    )
    for (total, bound), part in zip(sums.tolist(), values.split(block), strict=True):
        exact, absolute = fsum(part.tolist()), fsum(part.abs().tolist())
        times, more = rounding_bounds(1, len(part), block, dtype)
        assert bound * (1 + 1e-12) >= absolute
        assert bound <= 2.0 * absolute + block * 1.2e-19 or make in {growing, tiny}
        half = torch.finfo(dtype).eps / 2 if dtype in FLOATS[2:] else 0.0
        assert abs(total - exact) <= (times - half) / 2 * absolute + more


def test_sums_of_integers_are_exact() -> None:
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.uint16, torch.uint32):
        values = torch.randint(-(2**63), 2**63 - 1, (300_001,)).to(dtype)
        sums, _ = block_sums(values, 1 << 17, is_input=True)
        bits = 8 * dtype.itemsize
        for part, total in zip(values.split(1 << 17), sums[:, 0].view(torch.int64).tolist(), strict=True):
            assert (int(sum(Fraction(each) for each in part.tolist())) - total) % 2**bits == 0
        assert not absolute_sum(values)


def test_an_empty_tensor_has_no_blocks() -> None:
    assert exact_sum(torch.empty(0)) == 0 and word_sum(torch.empty(0)) == 0
    assert len(block_sums(torch.empty(0), 16, is_input=True)[0]) == 0


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_a_word_sum_does_not_depend_on_the_place_in_memory(dtype: torch.dtype) -> None:
    room = torch.randint(0, 2, (64,), dtype=torch.uint8).repeat(dtype.itemsize)
    for count in (1, 2, 3, 5, 8, 17):
        prints = set()
        for shift in range(5):
            laid = torch.zeros(64 * dtype.itemsize, dtype=torch.uint8).view(dtype)[shift : shift + count]
            octets = laid.view(torch.uint8)
            octets.copy_(room[: len(octets)])
            prints.add(int(word_sum(laid)))
        assert len(prints) == 1
        for bit in range(8 * len(octets) if dtype != torch.bool else 0):
            octets[bit // 8] ^= 1 << bit % 8
            assert int(word_sum(laid)) not in prints
            octets[bit // 8] ^= 1 << bit % 8


def test_two_of_three_copies_are_the_majority() -> None:
    whole = torch.randint(-(2**63), 2**63 - 1, (4, 1, 9))
    copies = whole.repeat(1, COPIES, 1)
    copies[torch.arange(4), torch.tensor([0, 1, 2, 1]), 3] ^= 1 << 40
    assert torch.equal(majority(copies), whole.squeeze(1))
