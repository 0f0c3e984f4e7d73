"""What `hpctrain doctor` tells of products in 8 bits: which recipes a device multiplies so itself."""

from __future__ import annotations

import torch

from hpctrain.host.device import choose_device, visible_gpus
from hpctrain.host.doctor import DoctorFinding
from hpctrain.parallel.fp8.multiply import has_native
from hpctrain.parallel.fp8.recipes import RECIPES, ScalingRecipe

WAYS = {
    "all": "in 8 bits: {}",
    "stored": "in 8 bits except for weight gradients: {}",
    "none": "emulated in 16 or 32 bits, slower than bf16: {}",
}
"""What is said of recipes by how `native` finds them."""


def check_fp8_products(local_rank: int) -> DoctorFinding:
    """Which recipes the device of a local rank multiplies in 8 bits, and which are emulated there."""
    device = choose_device("auto", local_rank, visible_gpus())
    how = {name: native(recipe, device) for name, recipe in RECIPES.items()}
    names = {way: ", ".join(name for name in how if how[name] == way) for way in WAYS}
    return DoctorFinding(
        "FP8 products", "; ".join(WAYS[way].format(some) for way, some in names.items() if some)
    )


def native(recipe: ScalingRecipe, device: torch.device) -> str:
    """Of the products of a layer, in bf16 and for sums in fp32, which a device has: "all", the "stored" ones
    (forward and input gradients) or "none".
    """
    if any(scaling.blocks.columns is not None for scaling in (recipe.tokens, recipe.weights)):
        return "none"
    by_row = recipe.tokens.blocks.rows is not None
    if not has_native(device, by_row, torch.bfloat16):
        return "none"
    return "all" if has_native(device, by_row, torch.float32) else "stored"
