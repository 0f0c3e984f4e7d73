"""Pseudo-random words of 64 bits that depend on numbers alone, so that each rank knows those of all ranks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hpctrain.splitmix import GOLDEN, mix


def random_words(count: int, seed: int = 0) -> Tensor:
    """Return `count` words, int64, in host memory."""
    numbers = np.arange(1, count + 1, dtype=np.uint64)
    numbers += np.array([key(seed)], dtype=np.int64).view(np.uint64)
    numbers *= np.uint64(GOLDEN)
    return torch.from_numpy(mix(numbers).view(np.int64))


def key(*numbers: int) -> int:
    """Return the word of some numbers from 0 on. Blocks combine it with their words by exclusive or."""
    word = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        word = mix((word + np.uint64(number + 1)) * np.uint64(GOLDEN))
    return int(word.view(np.int64)[0])
