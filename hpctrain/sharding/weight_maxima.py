"""The largest magnitudes of weights that are multiplied in 8 bits, found once for as long as weights stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.memory.scratch import read_pieces
from hpctrain.parallel.fp8.formats import agreed_maximum
from hpctrain.parallel.fp8.quantized_matmul import WEIGHTS, Dims, QuantizedMatmul
from hpctrain.parallel.linear import SplitLinear
from hpctrain.sharding.bucket import Bucket


class WeightMaxima:
    """What a step's products would else find of the same weights again and again, and agree on each time.

    That is one number of each matrix that has one scale, and where tensor ranks have parts of a matrix's rows
    (or columns) that have scales of their own, these rows' numbers: in one small reduction over the tensor
    axis. Of parameters in slices (ZeRO-3) that one number comes from these, in another one over their ranks,
    where the tensor ranks have to agree or matrices are gathered in 8 bits; else, as rows that slices cut, it
    is found of gathered ones.
    """

    def __init__(self, products: Iterable[QuantizedMatmul], buckets: Sequence[Bucket], tensor: Group) -> None:
        self._tensor = tensor
        self._whole: list[tuple[QuantizedMatmul, Dims]] = []
        self._cut: list[QuantizedMatmul] = []
        held = {s.parameter: bucket for bucket in buckets for s in bucket.segments}
        for product in products:
            bucket = held[product.weights[0]]
            if bucket.sharding.zero < 3:
                self._whole += [(product, dims) for dims in product.weight_dims]
            elif product.weight_dims == (WEIGHTS,) and (
                product.gathered or (tensor.size > 1 and isinstance(bucket.own_values, Tensor))
            ):
                self._cut.append(product)
        self._slices = list(dict.fromkeys(held[product.weights[0]] for product in self._cut))

    @contextmanager
    def known(self) -> Iterator[None]:
        """Products know them within, where weights must stay what they are. Collective over those who have
        slices or parts of the same matrices.
        """
        known = [*self._whole, *((product, WEIGHTS) for product in self._cut)]
        own = [agreed_maximum(product.own_weight_maxima(dims)) for product, dims in self._whole]
        own += self._of_slices()
        if own:
            agreed = torch.cat([maxima.flatten() for maxima in own])
            if self._tensor.size > 1:
                agreed = self._tensor.all_reduce(agreed, "max")
            pieces = agreed.split([maxima.numel() for maxima in own])
            for (product, dims), maxima, piece in zip(known, own, pieces, strict=True):
                product.know_weights(dims, piece.view_as(maxima))
        try:
            yield
        finally:
            for product, _ in known:
                product.forget_weights()

    def _of_slices(self) -> list[Tensor]:
        """One number of each matrix in slices, of all of these."""
        if not self._cut:
            return []
        numbers = {weight: i for i, product in enumerate(self._cut) for weight in product.weights}
        group = self._slices[0].sharding.group
        found = torch.zeros(len(self._cut), device=group.device)
        for bucket in self._slices:
            assert bucket.sharding.group is group
            for segment, own, _ in bucket.owned(bucket.own_values):
                number = numbers.get(segment.parameter)
                if number is None or not own.numel():
                    continue
                for _, values in read_pieces(own):
                    most = agreed_maximum(values.abs().amax()).to(group.device)
                    found[number] = torch.maximum(found[number], most)
        found = group.all_reduce(found, "max") if group.size > 1 else found
        return [each.view(1, 1) for each in found]


def products_in_8_bits(layers: Iterable[torch.nn.Module]) -> list[QuantizedMatmul]:
    """All of some layers."""
    linear = (module for layer in layers for module in layer.modules() if isinstance(module, SplitLinear))
    return [layer.product for layer in linear if isinstance(layer.product, QuantizedMatmul)]


def quantized_products(layers: Iterable[torch.nn.Module]) -> list[QuantizedMatmul]:
    """Those whose scales follow from the weights themselves, and so are found anew in each step."""
    return [product for product in products_in_8_bits(layers) if not product.recipe.delayed]
