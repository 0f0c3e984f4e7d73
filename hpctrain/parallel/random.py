"""Counter-based random numbers: functions of what they are for, never of the layout.

Everything here is a hash of a seed and an index, so that any rank can compute any element alone.
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


@lru_cache(maxsize=1)
def _quantiles() -> npt.NDArray[np.float64]:
    """Normal quantiles at k / 2^16, the two ends cut at half a step (4.3 standard deviations)."""
    cells, quantile = 1 << _QUANTILE_BITS, NormalDist().inv_cdf
    inner = [quantile(k / cells) for k in range(1, cells)]
    end = quantile(0.5 / cells)
    return np.array([end, *inner, -end])


def _mixed(counter: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """SplitMix64 of `counter` in the stream of `key`, in place."""
    counter *= np.uint64(GOLDEN)
    counter += np.uint64(key)
    return mix(counter)


def key_of(seed: int, name: str) -> int:
    """A 64-bit key of a seed and a name."""
    low, high = zlib.crc32(name.encode()), zlib.adler32(name.encode())
    start = np.array([(seed * 0xD1342543DE82EF95 + (high << 32) + low) % 2**64], np.uint64)
    return int(_mixed(start, 0x632BE59BD9B4E019)[0])


def normal(key: int, indices: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """The elements at `indices` of a stream of standard normal numbers, cut at 4.3.

    Inverse transform over a table of quantiles with linear interpolation. Only exactly rounded
    operations follow the hash, so that the bits do not depend on how a tensor is cut in pieces.
    """
    table, bits = _quantiles(), _mixed(indices.copy(), key)
    cell = (bits >> np.uint64(64 - _QUANTILE_BITS)).astype(np.int64)
    within = ((bits >> np.uint64(16)) & np.uint64(0xFFFFFFFF)).astype(np.float64) * 2.0**-32
    lower = table[cell]
    upper = table[cell + 1]
    result: npt.NDArray[np.float64] = lower + (upper - lower) * within
    return result


def signs(key: int, count: int) -> npt.NDArray[np.float32]:
    """The first so many of a stream of -1 and 1."""
    bits = _mixed(np.arange(count, dtype=np.uint64), key) >> np.uint64(63)
    made: npt.NDArray[np.float32] = bits.astype(np.float32) * np.float32(2) - np.float32(1)
    return made


def _mix32(x: Tensor) -> Tensor:
    """A 32-bit finalizer (MurmurHash3) of int32 values, in place, with wrapping products."""
    x ^= (x >> 16) & 0xFFFF
    x *= -2048144789
    x ^= (x >> 13) & 0x7FFFF
    x *= -1028477387
    x ^= (x >> 16) & 0xFFFF
    return x


@dataclass(frozen=True)
class DropoutSource:
    """Draws the masks of one micro-batch.

    A mask's element depends on seed, step, site (a number of the place in the model), sample number,
    position in the sequence and feature; so recomputation and every layout draw the same masks,
    replicated activations the same on every rank, split ones their own parts.
    `samples` is [b] int64, its `first` a number on the host; `positions` [s] int64 of the local piece.
    """

    seed: int
    step: int
    samples: Tensor
    positions: Tensor
    first: int = 0

    def mask(self, site: int, positions: Tensor, features: int, probability: float) -> Tensor:
        """Bool mask [s, b, features], true where an element stays (with 1 - probability)."""
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
