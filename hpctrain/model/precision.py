"""Number formats that a deck selects, as torch dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch

from hpctrain.deck.schema import Deck
from hpctrain.parallel.fp8.recipes import GRADIENT_FORMS, RECIPES, Fp8Settings

DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})

DOUBLE = "fp64"
"""Value of `precision.compute` in comparisons of modules. No deck may ask for it."""

DOUBLE_FP8 = "fp8 in fp64"
"""Value of `precision.compute` in comparisons of products in 8 bits. No deck may ask for it.

All that is not multiplied in 8 bits is in fp64, so that two layouts quantize the same numbers.
"""


@dataclass(frozen=True)
class Precision:
    """Formats of a model's numbers.

    Attributes:
        storage: dtype of parameters, activations and messages.
        product: dtype in which matrices are multiplied.
        gradient: dtype of the buffers in which weight gradients are summed.
        fp8: Settings of products in 8 bits; None without them. All other products use `product`.
    """

    storage: torch.dtype
    product: torch.dtype
    gradient: torch.dtype
    fp8: Fp8Settings | None = None

    @staticmethod
    def of(deck: Deck) -> Precision:
        """Return the formats that a deck asks for."""
        keys = deck.precision
        fp8 = None
        if keys.compute in {"fp8", DOUBLE_FP8}:
            recipe, form = RECIPES[keys.fp8], GRADIENT_FORMS[keys.fp8_gradients]
            options = keys.fp8_exclude, keys.fp8_messages, keys.fp8_gather
            fp8 = Fp8Settings(recipe, form, keys.fp8_history, *options)
        if keys.compute in {DOUBLE, DOUBLE_FP8}:
            return Precision(torch.float64, torch.float64, torch.float64, fp8)
        compute = torch.bfloat16 if keys.compute == "fp8" else DTYPES[keys.compute]
        gradient = compute if keys.gradients == "compute" else torch.float32
        return Precision(compute, compute, gradient, fp8)

    @property
    def scales_loss(self) -> bool:
        """True if gradients would underflow without a loss scale."""
        return torch.float16 in {self.storage, self.product, self.gradient}
