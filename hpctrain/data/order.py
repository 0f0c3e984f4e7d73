"""Order of the samples: a seeded pseudo-random permutation per epoch that is computed, not stored.

The permutation is a generalized Feistel network with cycle walking (Black and Rogaway, "Ciphers with
arbitrary finite domains", CT-RSA 2002). A number below a*b is written as two digits. Every round adds a
pseudo-random function of one digit to the other. Each round can be undone, whatever the function, so the
rounds permute range(a*b). A result of `count` or more is permuted again until it is smaller. Only integers
are used, so the order is the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from hpctrain.splitmix import GOLDEN, mix

Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

ROUNDS = 8
MASK = (1 << 64) - 1


@dataclass(frozen=True)
class SampleOrder:
    """Pseudo-random order of `count` samples, counted over all epochs.

    Positions e*count to (e+1)*count - 1 are epoch e. They contain every sample once, in an order that depends
    only on seed, epoch and count. `count` is at most 2^62.
    """

    count: int
    seed: int

    def __post_init__(self) -> None:
        assert 0 < self.count <= 1 << 62, self.count

    def at(self, indices: Integers) -> Integers:
        """Return the numbers of the samples, in range(count), at positions >= 0 [n]."""
        side = isqrt(self.count - 1) + 1  # a = b = side, the smallest for which side^2 >= count
        radix = np.uint64(side)
        epochs, positions = np.divmod(indices.astype(np.uint64), np.uint64(self.count))
        seed = np.uint64(self.seed * GOLDEN & MASK)
        keys = mix(mix(epochs + np.uint64(1)) ^ seed)
        pending = np.arange(len(positions))
        while len(pending):
            positions[pending] = self._permute(positions[pending], keys[pending], radix)
            pending = pending[positions[pending] >= np.uint64(self.count)]
        return positions.astype(np.int64)

    def epochs(self, indices: Integers) -> Integers:
        """Return the epochs (from 0) of positions [n]."""
        return indices // self.count

    def epochs_by_entry(self, samples: int) -> dict[str, float]:  # noqa: ARG002
        """Return an empty dict, since these samples are not a mixture."""
        return {}

    @staticmethod
    def _permute(positions: Words, keys: Words, radix: np.uint64) -> Words:
        """Return the images of positions in a permutation of range(radix^2), each under its own key."""
        left, right = np.divmod(positions, radix)
        for number in range(1, ROUNDS + 1):
            salt = np.uint64(number * GOLDEN & MASK)
            word = mix(mix(keys + salt) + right)
            left, right = right, (left + word % radix) % radix
        return left * radix + right


@dataclass(frozen=True)
class PairedOrder(SampleOrder):
    """Pseudo-random order of `count` pairs of adjacent samples, which stay together.

    Pair i has the samples 2*i and 2*i + 1.
    """

    def at(self, indices: Integers) -> Integers:
        """Return the numbers of the samples, in range(2 * count), at positions >= 0 [n]."""
        return 2 * super().at(indices // 2) + indices % 2

    @override
    def epochs(self, indices: Integers) -> Integers:
        return super().epochs(indices // 2)
