"""Compare codes of blocks with NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpctrain.memory.compress import BLOCK
from hpctrain.sharding.compression.codecs import Codec, RoundedCodec, SignCodec, pack_signs, unpack_signs

CODECS: list[Codec] = [RoundedCodec("bf16"), RoundedCodec("int8"), SignCodec()]


def blocks(count: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(count, BLOCK, generator=torch.Generator().manual_seed(seed))
    return (values * torch.logspace(-3, 3, count).unsqueeze(1)).view(-1)


def test_signs_are_packed_as_numpy_packs_them() -> None:
    positive = torch.rand(7, BLOCK, generator=torch.Generator().manual_seed(1)) < 0.3
    scales = torch.arange(7.0)
    code = pack_signs(positive, scales)
    assert code.numel() == 7 * (BLOCK // 8 + 4)
    packed = np.packbits(positive.numpy().reshape(-1), bitorder="little")
    assert np.array_equal(code[: 7 * BLOCK // 8].numpy(), packed)
    again, same = unpack_signs(code)
    assert torch.equal(again, positive) and torch.equal(same, scales)


def test_a_sign_is_decoded_as_the_mean_magnitude_of_its_block() -> None:
    values = blocks(5)
    values[BLOCK + 10 : 2 * BLOCK] = 0  # a block of ten elements
    values[4 * BLOCK :] = 0
    counts = torch.tensor([BLOCK, 10.0, BLOCK, BLOCK, BLOCK])
    decoded = SignCodec().decode(SignCodec().encode(values, counts)).view(5, BLOCK).numpy()
    rows = values.view(5, BLOCK).numpy().astype(np.float64)
    means = np.abs(rows).sum(1) / counts.numpy()
    expected = np.where(rows >= 0, means[:, None], -means[:, None])
    np.testing.assert_allclose(decoded, expected, rtol=1e-6)
    assert not decoded[4].any()


@pytest.mark.parametrize(("form", "error"), [("bf16", 2.0**-8), ("int8", 1 / 253)])
def test_rounding_errors_are_bounded(form: str, error: float) -> None:
    values, codec = blocks(6), RoundedCodec(form)  # type: ignore[arg-type]
    code = codec.encode(values, torch.full((6,), float(BLOCK)))
    assert code.numel() == 6 * (codec.width + codec.scale)
    apart = (codec.decode(code) - values).view(6, BLOCK).abs()
    largest = values.view(6, BLOCK).abs()
    assert bool((apart <= error * (largest if form == "bf16" else largest.amax(1, keepdim=True))).all())
    assert bool(apart.any())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_remain_so(codec: Codec, bad: float) -> None:
    values = blocks(3)
    values[BLOCK + 7] = bad
    decoded = codec.decode(codec.encode(values, torch.full((3,), float(BLOCK)))).view(3, BLOCK)
    assert not bool(decoded[1].isfinite().all())
    assert bool(decoded[0].isfinite().all()) and bool(decoded[2].isfinite().all())


@pytest.mark.parametrize("codec", CODECS)
def test_no_blocks_have_an_empty_code(codec: Codec) -> None:
    code = codec.encode(torch.zeros(0), torch.zeros(0))
    assert code.numel() == 0 and codec.decode(code).numel() == 0
