"""The number formats that a deck names, as torch calls them."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch

from hpctrain.deck.schema import Deck

DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})


@dataclass(frozen=True)
class Precision:
    """Formats: `storage` of parameters, activations, messages; `product`, in which matrices are multiplied;
    `gradient` of the buffers in which weight gradients are summed.
    """

    storage: torch.dtype
    product: torch.dtype
    gradient: torch.dtype

    @staticmethod
    def of(deck: Deck) -> Precision:
        """What a deck asks for."""
        compute = DTYPES[deck.precision.compute]
        gradient = compute if deck.precision.gradients == "compute" else torch.float32
        return Precision(compute, compute, gradient)

    @property
    def scales_loss(self) -> bool:
        """Whether gradients would underflow without a loss scale."""
        return torch.float16 in {self.storage, self.product, self.gradient}
