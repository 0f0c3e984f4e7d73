"""What this machine computes per second, measured."""

from __future__ import annotations

import time
from statistics import median

import torch

_SIZES = {"cpu": 768, "cuda": 8192}
_REPEATS = 7


def measure_gemm_flops(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a square matrix product on this rank, the median of several; takes about a second.

    Every rank measures at the same time, so that ranks which share cores or memory count that in.
    """
    size = _SIZES[device.type]
    a = torch.ones(size, size, dtype=dtype, device=device)
    b = torch.ones(size, size, dtype=dtype, device=device)
    seconds = []
    for _ in range(_REPEATS + 2):
        _wait(device)
        start = time.perf_counter()
        a @ b
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / median(seconds[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
