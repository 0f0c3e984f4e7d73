"""The order of the samples: a seeded pseudo-random permutation per epoch that is never held.

A generalized Feistel network with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite
domains", CT-RSA 2002): a number below a*b is written as two digits; every round adds a pseudo-random
function of one digit to the other, which can be undone whatever the function, so that the rounds
permute range(a*b). Who lands at or beyond `count` walks on until it lands below. Only integers are
used, so the order is the same on every machine.
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
    """Which of `count` sequences is the sample at a position counted over all epochs.

    Positions e*count to (e+1)*count - 1 are epoch e: every sequence once, in an order that depends on
    seed, epoch and count alone. `count` is at most 2^62.
    """

    count: int
    seed: int

    def __post_init__(self) -> None:
        assert 0 < self.count <= 1 << 62, self.count

    def at(self, indices: Integers) -> Integers:
        """The sequences, in range(count), at positions >= 0 [n]."""
        side = isqrt(self.count - 1) + 1  # the smallest square that holds range(count): a = b = side
        radix = np.uint64(side)
        epochs, positions = np.divmod(indices.astype(np.uint64), np.uint64(self.count))
        seed = np.uint64(self.seed * GOLDEN & MASK)
        keys = mix(mix(epochs + np.uint64(1)) ^ seed)
        walking = np.arange(len(positions))
        while len(walking):
            positions[walking] = self._permute(positions[walking], keys[walking], radix)
            walking = walking[positions[walking] >= np.uint64(self.count)]
        return positions.astype(np.int64)

    def epochs(self, indices: Integers) -> Integers:
        """The epochs that positions are in, from 0."""
        return indices // self.count

    def by_entry(self, samples: int) -> dict[str, float]:  # noqa: ARG002
        """Nothing is told of the entries of a mixture, which this is none of."""
        return {}

    @staticmethod
    def _permute(positions: Words, keys: Words, radix: np.uint64) -> Words:
        """Permute range(radix^2), each position under its own key."""
        left, right = np.divmod(positions, radix)
        for turn in range(ROUNDS):
            salt = np.uint64((turn + 1) * GOLDEN & MASK)
            word = mix(mix(keys + salt) + right)
            left, right = right, (left + word % radix) % radix
        return left * radix + right


@dataclass(frozen=True)
class PairedOrder(SampleOrder):
    """Of `count` pairs of sequences, next to each other: pairs come in a seeded order, each whole."""

    def at(self, indices: Integers) -> Integers:
        """The sequences, in range(2 * count), at positions >= 0 [n]."""
        return 2 * super().at(indices // 2) + indices % 2

    @override
    def epochs(self, indices: Integers) -> Integers:
        return super().epochs(indices // 2)
