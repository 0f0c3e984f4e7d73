"""Recipes and settings: which operands are in 8 bits, what shares a scale, and from which maxima it comes.

`formats.py` has the rule by which a scale follows from a maximum.

A product sums over the last dim of both operands, [m, k] and [n, k], and blocks are described for such
operands. The three products of a layer need inputs, weights and output gradients twice each, once transposed.
Unless blocks are square, the transposed operand is quantized again from high precision
(`Scaling.transposed`).

| recipe | scales | from |
|---|---|---|
| tensor | one | the maximum of the tensor |
| delayed | one | the largest maximum of some earlier steps (Transformer Engine) |
| row | one for each row | the maximum of the row |
| block | one for 128 of a row; of weights one for 128 x 128 | the block's (DeepSeek-V3, arXiv 2412.19437) |
| mx | one for 32 of a row, as a byte | the block's (MXFP8, arXiv 2310.10537, rounded up: arXiv 2506.08027) |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hpctrain.parallel.fp8.formats import E4M3, E5M2, Fp8Format
from hpctrain.parallel.fp8.quantize import ScaleBlocks, Scaling

BLOCK = 128
"""Elements that share a scale in DeepSeek-V3."""

MX_BLOCK = 32
"""Elements that share a scale in MX."""


@dataclass(frozen=True)
class ScalingRecipe:
    """Scaling of the operands of a layer.

    Attributes:
        tokens: Scaling of activations and gradients.
        weights: Scaling of weights.
        delayed: True if scales follow from maxima of earlier steps.
    """

    tokens: Scaling
    weights: Scaling
    delayed: bool = False


_TENSOR = Scaling(ScaleBlocks())
_ROW = Scaling(ScaleBlocks(rows=1))
_MX = Scaling(ScaleBlocks(1, MX_BLOCK), as_bytes=True)

RECIPES: Mapping[str, ScalingRecipe] = {
    "tensor": ScalingRecipe(_TENSOR, _TENSOR),
    "delayed": ScalingRecipe(_TENSOR, _TENSOR, delayed=True),
    "row": ScalingRecipe(_ROW, _ROW),
    "block": ScalingRecipe(Scaling(ScaleBlocks(1, BLOCK)), Scaling(ScaleBlocks(BLOCK, BLOCK))),
    "mx": ScalingRecipe(_MX, _MX),
}
"""Recipes by their name in the deck."""

GRADIENT_FORMS: Mapping[str, Fp8Format] = {"e5m2": E5M2, "e4m3": E4M3}
"""Formats of gradients of outputs by their name in the deck."""

NEVER_QUANTIZED = ("head", "embedding.*")
"""Layers that are never in 8 bits. A tied head is the table of the embedding."""


@dataclass(frozen=True)
class Fp8Settings:
    """Recipe and formats of products in 8 bits.

    Attributes:
        recipe: Which elements of operands share a scale.
        gradient_format: Format of the gradients of outputs.
        history_steps: Steps in the history of a recipe with delayed scales.
        excluded_patterns: Patterns of the names of matrices that are not in 8 bits.
        quantize_messages: True if ranks exchange pieces of sequences in 8 bits.
        quantize_gathers: True if ranks gather slices of weights in 8 bits.
    """

    recipe: ScalingRecipe
    gradient_format: Fp8Format = E5M2
    history_steps: int = 1
    excluded_patterns: tuple[str, ...] = ()
    quantize_messages: bool = False
    quantize_gathers: bool = False

    def excludes(self, name: str) -> bool:
        """Return True if a parameter of this name is not multiplied in 8 bits."""
        return any(
            matches_parameter(pattern, name) for pattern in (*NEVER_QUANTIZED, *self.excluded_patterns)
        )


def matches_parameter(pattern: str, name: str) -> bool:
    """Return True if a pattern matches a parameter ("blocks.0.attention.output.weight") or its layer."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)
