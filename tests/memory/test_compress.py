"""Errors of compressed activations against their stated bounds."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hpctrain.costs.compressed_bytes import compress_peak, compressed_bytes
from hpctrain.memory.compress import BLOCK, compress, expand


def values(length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values of very different sizes, as with outliers among activations."""
    generator = torch.Generator().manual_seed(length)
    plain = torch.randn(length, generator=generator, dtype=torch.float64)
    return (plain * 10.0 ** (3 * torch.randn(length, generator=generator, dtype=torch.float64))).to(dtype)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["exact", "bf16", "int8"])
def test_compression_errors_stay_below_bounds(form: str, dtype: torch.dtype, length: int) -> None:
    x = values(length, dtype)
    stored = compress(x, form)
    assert (stored.dtype, stored.numel()) == (torch.uint8, compressed_bytes(length, dtype.itemsize, form))
    again = expand(stored, form, length, dtype)
    assert again.dtype == dtype and again.shape == x.shape
    error = (again.double() - x.double()).abs()
    if form == "exact" or (form == "bf16" and dtype == torch.bfloat16):
        assert torch.equal(again, x)
    elif form == "bf16":
        assert (error <= 2**-8 * x.double().abs()).all()
        assert error.max() > 0
    else:
        largest = torch.cat([part.abs().amax().expand(part.numel()) for part in x.split(BLOCK)]).double()
        rounding = 2**-8 * again.double().abs() if dtype == torch.bfloat16 else 1e-6 * largest
        assert (error <= largest / 254 + rounding).all()


@pytest.mark.parametrize("length", [256 * 40, 256 * 40 + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["exact", "bf16", "int8"])
def test_compress_peak_is_what_torch_allocates(form: str, dtype: torch.dtype, length: int) -> None:
    x = values(length, dtype)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        compress(x, form)
    steps = [each.nbytes() for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    allocated = max(accumulate(steps, initial=0))
    assert allocated <= compress_peak(length, dtype.itemsize, form) <= 1.01 * allocated


def test_zeros_stay_zeros() -> None:
    assert expand(compress(torch.zeros(300), "int8"), "int8", 300, torch.float32).eq(0).all()


@pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_values_change_only_their_own_block(wrong: float) -> None:
    x = torch.randn(3 * BLOCK)
    x[BLOCK + 5] = wrong
    again = expand(compress(x, "int8"), "int8", x.numel(), x.dtype)
    assert not again[BLOCK : 2 * BLOCK].isfinite().any()
    assert again[:BLOCK].isfinite().all() and again[2 * BLOCK :].isfinite().all()
    assert not expand(compress(x, "bf16"), "bf16", x.numel(), x.dtype)[BLOCK + 5].isfinite()
