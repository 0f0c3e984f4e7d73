"""Recipes: how the matrices of a layer's three products are scaled, and from which maxima.

A product adds up along the last dim of both of its matrices, [m, k] and [n, k], and blocks are told of
matrices that lie so. In the three products of a layer inputs, weights and output gradients are each needed
twice, once transposed: unless blocks are square, that is another matrix in 8 bits, made of the same numbers
in high precision (`Scaling.transposed`).

| recipe | scales | from |
|---|---|---|
| tensor | one | the tensor's own maximum |
| delayed | one | the largest of the maxima of some steps before (Transformer Engine) |
| row | one a row | the row's maximum |
| block | one for 128 of a row; of weights one for 128 x 128 | the block's (DeepSeek-V3, arXiv 2412.19437) |
| mx | one for 32 of a row, as a byte | the block's (MXFP8, arXiv 2310.10537, rounded up: arXiv 2506.08027) |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.parallel.fp8.formats import E4M3, E5M2, Fp8Format
from hpctrain.parallel.fp8.quantize import ScaleBlocks, Scaling

BLOCK = 128
"""Elements along which DeepSeek-V3 has one scale."""

MX_BLOCK = 32
"""Elements along which MX has one scale."""


@dataclass(frozen=True)
class ScalingRecipe:
    """How `weights` are scaled, and how activations and gradients, the `tokens`; `delayed` says that scales
    follow from maxima of steps before.
    """

    tokens: Scaling
    weights: Scaling
    delayed: bool = False


_WHOLE = Scaling(ScaleBlocks())
_ROW = Scaling(ScaleBlocks(rows=1))
_MX = Scaling(ScaleBlocks(1, MX_BLOCK), as_bytes=True)

RECIPES: Mapping[str, ScalingRecipe] = {
    "tensor": ScalingRecipe(_WHOLE, _WHOLE),
    "delayed": ScalingRecipe(_WHOLE, _WHOLE, delayed=True),
    "row": ScalingRecipe(_ROW, _ROW),
    "block": ScalingRecipe(Scaling(ScaleBlocks(1, BLOCK)), Scaling(ScaleBlocks(BLOCK, BLOCK))),
    "mx": ScalingRecipe(_MX, _MX),
}
"""By the name that a deck has for each."""

GRADIENT_FORMS: Mapping[str, Fp8Format] = {"e5m2": E5M2, "e4m3": E4M3}
"""Of gradients of outputs, by the name that a deck has for each."""
