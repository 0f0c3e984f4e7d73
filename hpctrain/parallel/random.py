"""Counter-based random numbers, which do not depend on the layout.

Each number is a hash of a seed, a name and an index, so any rank can compute any element alone.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpctrain.splitmix import GOLDEN, mix

_QUANTILE_BITS = 16
"""Logarithm of the number of cells in the table of quantiles."""


@lru_cache(maxsize=1)
def _quantiles() -> npt.NDArray[np.float64]:
    """Return normal quantiles at k / 2^16; the ends are at half a step (4.3 standard deviations)."""
    cells, quantile = 1 << _QUANTILE_BITS, NormalDist().inv_cdf
    inner = [quantile(k / cells) for k in range(1, cells)]
    end = quantile(0.5 / cells)
    return np.array([end, *inner, -end])


def _mixed(counter: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """Return SplitMix64 of `counter` in the stream of `key`, computed in place."""
    counter *= np.uint64(GOLDEN)
    counter += np.uint64(key)
    return mix(counter)


def key_of(seed: int, name: str) -> int:
    """Return a 64-bit key for a seed and a name."""
    low, high = zlib.crc32(name.encode()), zlib.adler32(name.encode())
    start = np.array([(seed * 0xD1342543DE82EF95 + (high << 32) + low) % 2**64], np.uint64)
    return int(_mixed(start, 0x632BE59BD9B4E019)[0])


def normal(key: int, indices: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return the elements at `indices` of a stream of standard normal numbers, limited to 4.3.

    They are interpolated linearly in a table of quantiles. Only exactly rounded operations follow the hash,
    so the bits do not depend on how a tensor is split.
    """
    table, bits = _quantiles(), _mixed(indices.copy(), key)
    cell = (bits >> np.uint64(64 - _QUANTILE_BITS)).astype(np.int64)
    within = ((bits >> np.uint64(16)) & np.uint64(0xFFFFFFFF)).astype(np.float64) * 2.0**-32
    lower = table[cell]
    upper = table[cell + 1]
    result: npt.NDArray[np.float64] = lower + (upper - lower) * within
    return result


def signs(key: int, count: int) -> npt.NDArray[np.float32]:
    """Return the first `count` elements of a stream of -1 and 1."""
    bits = _mixed(np.arange(count, dtype=np.uint64), key) >> np.uint64(63)
    values: npt.NDArray[np.float32] = bits.astype(np.float32) * np.float32(2) - np.float32(1)
    return values


def _mix32(x: Tensor) -> Tensor:
    """Return the 32-bit finalizer of MurmurHash3 of int32 values, in place, with wrapping products."""
    x ^= (x >> 16) & 0xFFFF
    x *= -2048144789
    x ^= (x >> 13) & 0x7FFFF
    x *= -1028477387
    x ^= (x >> 16) & 0xFFFF
    return x


@dataclass(frozen=True)
class DropoutSource:
    """Source of the dropout masks of one micro-batch.

    An element of a mask depends on seed, step, site in the model, sample, position and feature. So
    recomputation and every layout draw the same masks: replicated activations have the same mask on every
    rank, split ones their part of it.

    Attributes:
        seed: Seed of the run.
        step: Number of the step.
        samples: Sample numbers [b] int64.
        positions: Global positions [s] int64 of this rank's piece.
        first: First sample number, on the host.
    """

    seed: int
    step: int
    samples: Tensor
    positions: Tensor
    first: int = 0

    def mask(self, site: int, positions: Tensor, features: int, probability: float) -> Tensor:
        """Return a mask, bool [s, b, features], true where an element is not dropped.

        Args:
            site: Number of the place in the model.
            positions: Global positions [s] of the rows.
            features: Features of a row.
            probability: Probability with which an element is dropped.
        """
        key = key_of(self.seed, f"dropout {self.step} {site}") & 0x7FFFFFFF
        rows = _mix32((self.samples.int() * 40503 + key).clone())
        rows = _mix32(positions.int().unsqueeze(1) * 69069 + rows.unsqueeze(0))
        columns = torch.arange(features, dtype=torch.int32, device=rows.device) * -1640531527
        bits = _mix32(rows.unsqueeze(-1) + columns)
        threshold = int((1.0 - probability) * 2**32) - 2**31
        return bits < threshold


def dropout(x: Tensor, source: DropoutSource, site: int, positions: Tensor, probability: float) -> Tensor:
    """Return `x` with elements dropped and the others scaled by 1 / (1 - probability).

    Args:
        x: Tensor [s, b, features].
        source: Random numbers of the micro-batch.
        site: Number of the place in the model.
        positions: Global positions [s] of the rows of `x`.
        probability: Probability with which an element is dropped.
    """
    if probability == 0.0:
        return x
    mask = source.mask(site, positions, x.shape[-1], probability)
    return x * mask / (1.0 - probability)
