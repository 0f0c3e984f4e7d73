"""Largest magnitudes of the weights of 8-bit products, computed once per step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.memory.scratch import read_pieces
from hpctrain.parallel.fp8.formats import reducible_maximum
from hpctrain.parallel.fp8.quantized_matmul import WEIGHTS, Dims, QuantizedMatmul
from hpctrain.parallel.tensor import SplitLinear
from hpctrain.sharding.bucket import Bucket


class WeightMaxima:
    """Maxima of weights that products would otherwise compute, and reduce, for each micro-batch.

    A matrix with one scale has one maximum. If each row (or column) has a scale, and tensor ranks hold parts
    of the rows (or columns), there is one maximum for each of them. All are reduced together over the tensor
    axis. With ZeRO-3 the maximum of a matrix with one scale comes from the slices, by a second small
    reduction over their ranks, if the tensor ranks must agree on it or matrices are gathered in 8 bits. In
    other cases products compute it from gathered weights.

    Args:
        products: 8-bit products of the model. Those with delayed scales need no maxima.
        buckets: Buckets of their weights.
        tensor: Group of the tensor axis.
    """

    def __init__(self, products: Iterable[QuantizedMatmul], buckets: Sequence[Bucket], tensor: Group) -> None:
        self._tensor = tensor
        self._gathered_products: list[tuple[QuantizedMatmul, Dims]] = []
        self._sliced_products: list[QuantizedMatmul] = []
        bucket_of = {s.parameter: bucket for bucket in buckets for s in bucket.segments}
        for product in products:
            if product.recipe.delayed:
                continue
            bucket = bucket_of[product.weights[0]]
            needs_agreement = tensor.size > 1 and isinstance(bucket.owned_values, Tensor)
            if bucket.sharding.zero < 3:
                self._gathered_products += [(product, dims) for dims in product.weight_dims]
            elif product.weight_dims == (WEIGHTS,) and (needs_agreement or product.settings.quantize_gathers):
                self._sliced_products.append(product)
        self._slices = list(dict.fromkeys(bucket_of[product.weights[0]] for product in self._sliced_products))

    @contextmanager
    def provide_maxima(self) -> Iterator[None]:
        """Give the products their maxima during the block, in which weights must not change.

        Collective over the ranks that have slices or parts of the same matrices.
        """
        provided = [*self._gathered_products, *((product, WEIGHTS) for product in self._sliced_products)]
        local = (product.local_weight_maxima(dims) for product, dims in self._gathered_products)
        maxima_here = [*map(reducible_maximum, local), *self._slice_maxima()]
        if maxima_here:
            agreed = torch.cat([maxima.flatten() for maxima in maxima_here])
            if self._tensor.size > 1:
                agreed = self._tensor.all_reduce(agreed, "max")
            pieces = agreed.split([maxima.numel() for maxima in maxima_here])
            for (product, dims), maxima, piece in zip(provided, maxima_here, pieces, strict=True):
                product.set_weight_maxima(dims, piece.view_as(maxima))
        try:
            yield
        finally:
            for product, _ in provided:
                product.clear_weight_maxima()

    def _slice_maxima(self) -> list[Tensor]:
        """Return the maximum, [1, 1], of each matrix that is split into slices."""
        if not self._sliced_products:
            return []
        numbers = {weight: i for i, product in enumerate(self._sliced_products) for weight in product.weights}
        group = self._slices[0].sharding.group
        maxima = torch.zeros(len(self._sliced_products), device=group.device)
        for bucket in self._slices:
            assert bucket.sharding.group is group
            for segment, elements, _ in bucket.owned_segments(bucket.owned_values):
                number = numbers.get(segment.parameter)
                if number is None or not elements.numel():
                    continue
                for _, values in read_pieces(elements):
                    most = reducible_maximum(values.abs().amax()).to(group.device)
                    maxima[number] = torch.maximum(maxima[number], most)
        maxima = group.all_reduce(maxima, "max") if group.size > 1 else maxima
        return [each.view(1, 1) for each in maxima]


def products_in_8_bits(layers: Iterable[torch.nn.Module]) -> list[QuantizedMatmul]:
    """Return the 8-bit products of some layers."""
    linear = (module for layer in layers for module in layer.modules() if isinstance(module, SplitLinear))
    return [layer.product for layer in linear if isinstance(layer.product, QuantizedMatmul)]
