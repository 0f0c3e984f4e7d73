"""Seeds of user code. They are set for each item, so that its random numbers do not depend on the process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from hpctrain.splitmix import GOLDEN, mix

_WORD = 1 << 64


def seed_by(*numbers: int) -> None:
    """Seed the global generators of torch (on the host), numpy and Python with a function of `numbers`."""
    key = 0
    for number in numbers:
        key = int(mix(np.array([(key ^ number) % _WORD * GOLDEN % _WORD], np.uint64))[0])
    torch.default_generator.manual_seed(key >> 1)
    np.random.seed([key >> 32, key & 0xFFFFFFFF])  # noqa: NPY002
    random.seed(key)


@contextmanager
def restored_generators() -> Iterator[None]:
    """Restore the states of the generators of torch (on the host), numpy and Python after the block."""
    of_torch, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)  # noqa: NPY002
        random.setstate(of_python)
