"""Gathering of weights in the 8-bit format in which they are multiplied (ZeRO-3).

If a matrix has one scale that all ranks know beforehand, each rank casts the elements that it owns. The
gathered codes are those that a product would compute from the gathered matrix, or from its transpose, and
take half of the bytes of 16-bit weights. The rest of a bucket (norms, biases, layers that multiply in 16
bits) is gathered in its own format.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.work import CombinedWork, Work
from hpctrain.parallel.fp8.formats import E4M3, ELEMENTS_AT_ONCE, reducible_maximum, scales_of, to_format
from hpctrain.parallel.fp8.quantization_loss import count_losses
from hpctrain.parallel.fp8.quantize import QuantizedTensor, ScaleBlocks
from hpctrain.parallel.fp8.quantized_matmul import PrequantizedWeights, QuantizedMatmul
from hpctrain.parallel.shards import Parameter
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketLayout, BucketSegment, share_sizes

UNIT = 16
"""Alignment in bytes that a GPU requires of matrices in 8-bit products."""

_ELEMENTS_AT_ONCE_ON_GPU = 16 * ELEMENTS_AT_ONCE
"""Number of elements that a GPU casts at a time."""


def make_bucket(products: Iterable[QuantizedMatmul], layout: BucketLayout, *arguments: Any) -> Bucket:
    """Return a bucket, which is an EightBitBucket if some of its weights can be gathered in 8 bits.

    Args:
        products: 8-bit products of the model.
        layout: Places of the parameters.
        *arguments: Further arguments of `Bucket`.
    """
    parameters = {segment.parameter for segment in layout.segments}
    matching = [each for each in products if each.settings.quantize_gathers and each.weights[0] in parameters]
    if layout.sharding.zero < 3 or not matching:
        return Bucket(layout, *arguments)
    return EightBitBucket(matching, layout, *arguments)


class _Packed:
    """Segments of a bucket, packed one after the other in the memory of gathered values.

    Args:
        layout: Layout of the bucket.
        segments: The segments.
        aligned: Parameters that begin at a multiple of UNIT.

    Attributes:
        places: First element of each parameter.
        owned_slice: This rank's share.
        sizes: Number of elements of each rank's share; None if all are equal.
    """

    def __init__(
        self, layout: BucketLayout, segments: Sequence[BucketSegment], aligned: Iterable[Parameter] = ()
    ) -> None:
        self.segments, self.places, self.length = segments, dict[Parameter, int](), 0
        firsts = set(aligned)
        for segment in segments:
            if segment.parameter in firsts:
                self.length = -(-self.length // UNIT) * UNIT
            self.places[segment.parameter] = self.length
            self.length += segment.length
        borders = [self._place(border) for border in layout.borders]
        self.owned_slice = slice(*borders[layout.sharding.group.rank :][:2])
        self.sizes = share_sizes(borders)

    def _place(self, border: int) -> int:
        """Return the end of the elements that precede a boundary of the bucket."""
        end = 0
        for segment in self.segments:
            if segment.start < border:
                end = self.places[segment.parameter] + min(border - segment.start, segment.length)
        return end


class EightBitBucket(Bucket):
    """Bucket with ZeRO-3 that gathers the weights of `products` in 8 bits.

    Until all products know the scale of their weights, as in the first step of delayed scaling, everything is
    gathered in its own format.
    """

    def __init__(self, products: Sequence[QuantizedMatmul], layout: BucketLayout, *arguments: Any) -> None:
        self.products = products
        self._numbers = {weight: i for i, product in enumerate(products) for weight in product.weights}
        matrices = [segment for segment in layout.segments if segment.parameter in self._numbers]
        rest = [segment for segment in layout.segments if segment.parameter not in self._numbers]
        self._matrices = _Packed(layout, matrices, [product.weights[0] for product in products])
        self._rest = _Packed(layout, rest)
        # Scales and counts of the current gather, without values.
        self._prequantized: list[PrequantizedWeights] = []
        super().__init__(layout, *arguments)
        self._rest_begins = -(-self._matrices.length // UNIT) * UNIT
        self._bytes = self._rest_begins + self._rest.length * self.dtype.itemsize

    @override
    def start_gather(self) -> Work[Tensor]:
        maxima = [product.weight_maxima for product in self.products]
        known = [each for each in maxima if each is not None]
        if len(known) < len(maxima):
            self._prequantized = []
            return super().start_gather()
        owned, gathered = self._owned_in_memory(), self._take()
        self._cast(owned, gathered, [scales_of(each, E4M3) for each in known])
        self.drop_fetched()
        group = self.sharding.group
        works = [
            group.start_all_gather(part[packed.owned_slice], part, packed.sizes)
            for packed, part in self._parts(gathered)
            if packed.length
        ]
        return CombinedWork(works, gathered)

    @override
    def release_values(self) -> None:
        for product in self.products:
            product.set_prequantized(None)
        super().release_values()

    @override
    def _set_views(self, full: Tensor) -> None:
        if not self._prequantized:
            super()._set_views(full)
            return
        (matrices, codes), (rest, rest_values) = self._parts(full)
        for segment in rest.segments:
            flat = rest_values[rest.places[segment.parameter] :][: segment.length]
            segment.parameter.data = flat.view(segment.parameter.shape)
        for product, prequantized in zip(self.products, self._prequantized, strict=True):
            first = matrices.places[product.weights[0]]
            rows = sum(weight.shape[0] for weight in product.weights)
            shape = rows, product.weights[0].shape[1]
            values = codes[first : first + shape[0] * shape[1]].view(shape).view(E4M3.dtype)
            quantized = QuantizedTensor(values, prequantized.weights.scales, prequantized.weights.blocks)
            product.set_prequantized(PrequantizedWeights(quantized, prequantized.counts))

    def _take(self) -> Tensor:
        """Return memory for gathered values.

        With delayed scaling it has the size that the first step needs.
        """
        if any(product.recipe.delayed for product in self.products):
            return self.sharding.pool.take(self.length, self.dtype)
        return self.sharding.pool.take(self._bytes, torch.uint8)

    def _parts(self, gathered: Tensor) -> tuple[tuple[_Packed, Tensor], tuple[_Packed, Tensor]]:
        """Return the matrices (as bytes) and the rest, as views of the memory of gathered values."""
        as_bytes = gathered.view(torch.uint8)
        assert len(as_bytes) >= self._bytes
        rest = as_bytes[self._rest_begins : self._bytes].view(self.dtype)
        return (self._matrices, as_bytes[: self._matrices.length]), (self._rest, rest)

    def _cast(self, owned: Tensor, gathered: Tensor, scales: Sequence[Tensor]) -> None:
        """Write this rank's share of the gathered values, and measure maxima and losses of the cast."""
        (matrices, codes), (rest, rest_values) = self._parts(gathered)
        records_losses = self.products[0].layer_context.statistics.detailed_step
        largest = [torch.zeros(1, device=owned.device) for _ in self.products]
        counts = [torch.zeros(3, dtype=torch.int64, device=gathered.device) for _ in self.products]
        for segment, elements, offset in self.owned_segments(owned):
            count, parameter = elements.numel(), segment.parameter
            if not count:
                continue
            number = self._numbers.get(parameter)
            if number is None:
                rest_values[rest.places[parameter] + offset :][:count].copy_(elements, non_blocking=True)
                continue
            into = codes[matrices.places[parameter] + offset :][:count].view(E4M3.dtype)
            _cast_into(into, elements, scales[number].view(1))
            if self.products[number].recipe.delayed:
                largest[number] = torch.maximum(largest[number], reducible_maximum(elements.abs().amax()))
            if records_losses:
                quantized = QuantizedTensor(into.view(1, -1), scales[number], ScaleBlocks())
                counts[number] += count_losses(elements.to(into.device).view(1, -1), quantized)
        for product, most in zip(self.products, largest, strict=True):
            product.record_weight_maximum(most)
        self._prequantized = [
            PrequantizedWeights(
                QuantizedTensor(codes[:0], scale, ScaleBlocks()), count if records_losses else None
            )
            for scale, count in zip(scales, counts, strict=True)
        ]


def _cast_into(into: Tensor, values: Tensor, scale: Tensor) -> None:
    """Cast values to 8 bits, like the products do, some elements at a time."""
    step = ELEMENTS_AT_ONCE if into.is_cpu else _ELEMENTS_AT_ONCE_ON_GPU
    for codes, part in zip(into.split(step), values.split(step), strict=True):
        part = part.to(into.device, non_blocking=True)  # noqa: PLW2901
        codes.view(torch.uint8).copy_(to_format(part / scale, E4M3).view(torch.uint8))
