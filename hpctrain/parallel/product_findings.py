"""Findings of `hpctrain doctor` about matrix products: the fastest kernels of a CPU, and 8-bit products."""

from __future__ import annotations

import torch

from hpctrain.host.device import on_host
from hpctrain.host.doctor import DoctorFinding
from hpctrain.host.processor import processor_name
from hpctrain.parallel.fp8.multiply import native_products
from hpctrain.parallel.fp8.recipes import RECIPES
from hpctrain.parallel.kernels.matmul_kernels import Pass
from hpctrain.parallel.kernels.timing import MatmulPass, measure, quickest

_SIZE = 1024
"""Rows, inputs and outputs of the measured products."""
_PASSES: tuple[tuple[Pass, str], ...] = (
    ("forward", "forward"),
    ("input_gradient", "input gradients"),
    ("weight_gradient", "weight gradients"),
)
_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}

_WAYS = {
    "all": "in 8 bits: {}",
    "stored": "in 8 bits except for weight gradients: {}",
    "none": "emulated in 16 or 32 bits, slower than bf16: {}",
}
"""Text for the recipes of each result of `native_products`."""


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


def check_fp8_products(device: torch.device) -> DoctorFinding:
    """Return which recipes a device multiplies in 8 bits, and which it emulates."""
    how = {name: native_products(recipe, device) for name, recipe in RECIPES.items()}
    names = {support: ", ".join(name for name in how if how[name] == support) for support in _WAYS}
    return DoctorFinding(
        "FP8 products",
        "; ".join(_WAYS[support].format(recipes) for support, recipes in names.items() if recipes),
    )
