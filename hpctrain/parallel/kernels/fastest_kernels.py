"""Finding of `hpctrain doctor` about the kernels of matrix products: which is fastest on this CPU."""

from __future__ import annotations

import torch

from hpctrain.host.device import on_host
from hpctrain.host.doctor import DoctorFinding
from hpctrain.host.processor import processor_name
from hpctrain.parallel.kernels.matmul_kernels import Pass
from hpctrain.parallel.kernels.timing import MatmulPass, measure, quickest

_SIZE = 1024
_PASSES: tuple[tuple[Pass, str], ...] = (
    ("forward", "forward"),
    ("input_gradient", "input gradients"),
    ("weight_gradient", "weight gradients"),
)
_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def check_kernels(device: torch.device) -> DoctorFinding:
    """Return which kernel multiplies matrices of medium size fastest, by format and pass.

    One thread measures it. On a GPU nothing is measured.
    """
    if not on_host(device):
        return DoctorFinding("matrix products", "computed by the library of the GPU")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = "; ".join(f"{name}: {_fastest(storage)}" for name, storage in _FORMATS.items())
    finally:
        torch.set_num_threads(before)
    return DoctorFinding("matrix products", f"{results} (one thread of {processor_name()})")


def _fastest(storage: torch.dtype) -> str:
    """Return the fastest kernel of each pass, with its speed relative to the library."""
    rows = measure([MatmulPass(kind, _SIZE, _SIZE, _SIZE) for kind, _ in _PASSES], storage, torch.float32)
    words = []
    for (_, name), seconds in zip(_PASSES, rows, strict=True):
        best = quickest(seconds)
        gain = (
            f" ({seconds['library'] / seconds[best]:.2g} times the library's speed)"
            if best != "library"
            else ""
        )
        words.append(f"{name} {best}{gain}")
    return ", ".join(words)
