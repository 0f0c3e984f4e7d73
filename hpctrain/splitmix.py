"""SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): random-looking words from consecutive numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio


def mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the mixing function of SplitMix64, a bijection of words, in place; return the same array."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words
