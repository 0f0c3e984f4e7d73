"""Compare encoded sums between replicas with NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.memory.compress import BLOCK
from hpctrain.sharding.local_steps.outer_format import FORMATS, start_sum

LARGEST = {"int8": 127, "int4": 7}


def by_numpy(values: np.ndarray, name: str) -> np.ndarray:
    """Return fp32 values of whole blocks after rounding to a format."""
    if name == "bf16":
        bits = values.view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
        return rounded.view(np.float32)
    rows = values.reshape(-1, BLOCK)
    scale = np.abs(rows).max(1, keepdims=True) / np.float32(LARGEST[name])
    numbers = np.rint(rows / np.where(scale > 0, scale, np.float32(1)))
    return (numbers * scale).astype(np.float32).reshape(-1)


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_codes_have_the_predicted_length_and_are_decoded_rounded(name: str) -> None:
    codec = FORMATS[name]
    assert codec is not None
    torch.manual_seed(5)
    values = torch.randn(6, BLOCK) * torch.logspace(-3, 3, 6)[:, None]
    values[2] = 0
    code = codec.encode(values.flatten(), torch.full((6,), BLOCK))
    assert (code.dtype, code.numel()) == (torch.uint8, 6 * (codec.width + codec.scale))
    assert codec.width * 8 == BLOCK * {"bf16": 16, "int8": 8, "int4": 4}[name]
    decoded = codec.decode(code)
    assert torch.equal(decoded, torch.from_numpy(by_numpy(values.numpy().ravel(), name)))
    assert not decoded[2 * BLOCK : 3 * BLOCK].any()


def blockwise(values: np.ndarray, lengths: tuple[int, ...], name: str) -> np.ndarray:
    """Return the result of `by_numpy` for blocks that begin at each parameter."""
    parts = []
    for part in np.split(values, np.cumsum(lengths)[:-1]):
        whole = np.zeros(-(-len(part) // BLOCK) * BLOCK, np.float32)
        whole[: len(part)] = part
        parts.append(by_numpy(whole, name)[: len(part)])
    return np.concatenate(parts)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("lengths", [(1,), (511,), (1100,), (4096,), (1, 700, 100, 2300)])
def test_values_and_sums_are_rounded(world: World, name: str, lengths: tuple[int, ...]) -> None:
    """Short values are sent in fp32. All ranks get the same bits."""
    group, length = Mesh(world, {"data": world.size}).group("data"), sum(lengths)
    everyone = np.random.default_rng(3).standard_normal((world.size, length), np.float32)
    everyone[:, : lengths[0]] *= 1e-4
    values = torch.from_numpy(everyone[world.rank].copy())
    found = start_sum(group, values, lengths, FORMATS[name]).wait()
    assert found is values
    if name == "fp32" or length < world.size * BLOCK:
        expected = everyone[0]
        for each in everyone[1:]:
            expected = expected + each
    else:
        total = np.zeros_like(everyone[0])
        for each in everyone:
            total = total + blockwise(each, lengths, name)
        expected = blockwise(total, lengths, name)
        assert expected[0] != 0
    assert torch.equal(found, torch.from_numpy(expected))
