"""Finding of `hpctrain doctor` about products in 8 bits: the recipes that a device supports."""

from __future__ import annotations

import torch

from hpctrain.host.doctor import DoctorFinding
from hpctrain.parallel.fp8.multiply import has_native
from hpctrain.parallel.fp8.recipes import RECIPES, ScalingRecipe

WAYS = {
    "all": "in 8 bits: {}",
    "stored": "in 8 bits except for weight gradients: {}",
    "none": "emulated in 16 or 32 bits, slower than bf16: {}",
}
"""Text for the recipes of each result of `native`."""


def check_fp8_products(device: torch.device) -> DoctorFinding:
    """Return which recipes a device multiplies in 8 bits, and which it emulates."""
    how = {name: native_products(recipe, device) for name, recipe in RECIPES.items()}
    names = {way: ", ".join(name for name in how if how[name] == way) for way in WAYS}
    return DoctorFinding(
        "FP8 products", "; ".join(WAYS[way].format(some) for way, some in names.items() if some)
    )


def native_products(recipe: ScalingRecipe, device: torch.device) -> str:
    """Return which products of a recipe a device computes in 8 bits.

    Returns:
        "all", "stored" for those with a result in bf16 (forward and input gradient), or "none".
    """
    if any(scaling.blocks.columns is not None for scaling in (recipe.tokens, recipe.weights)):
        return "none"
    by_row = recipe.tokens.blocks.rows is not None
    if not has_native(device, by_row, torch.bfloat16):
        return "none"
    return "all" if has_native(device, by_row, torch.float32) else "stored"
