"""What multiplies in each format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hpctrain.parallel.groups import LayerGroups
from hpctrain.parallel.product import Product
from hpctrain.parallel.shard import Parameter

PRODUCTS: Mapping[torch.dtype, type[Product]] = dict.fromkeys(
    (torch.float32, torch.bfloat16, torch.float16), Product
)
"""By `Precision.product`."""


def make_product(weights: Sequence[Parameter], groups: LayerGroups) -> Product:
    """The products of a layer's matrix, in the format of the groups."""
    return PRODUCTS[groups.product_format](weights, groups)
