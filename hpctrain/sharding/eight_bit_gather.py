"""Weights that are gathered in the 8 bits in which they are multiplied (ZeRO-3).

Where a matrix has one scale, which all ranks know before they have the matrix, each rank casts the elements
that it owns. What is gathered then are the very numbers that a product would make of the gathered matrix, the
transposed one's, too, in half of the bytes. The rest of a bucket (norms, biases, layers that multiply in 16
bits) is gathered beside it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.work import CombinedWork, Work
from hpctrain.parallel.fp8.formats import AT_ONCE, E4M3, agreed_maximum, scales_of, to_format
from hpctrain.parallel.fp8.quantize import QuantizedTensor, ScaleBlocks
from hpctrain.parallel.fp8.quantized_matmul import PrequantizedWeights, QuantizedMatmul
from hpctrain.parallel.fp8.watched import lost
from hpctrain.sharding.bucket import Bucket, Store
from hpctrain.sharding.bucket_layout import BucketLayout, BucketSegment
from hpctrain.sharding.weight_maxima import products_in_8_bits

UNIT = 16
"""Bytes of whose multiples a GPU's products in 8 bits want their matrices to begin at."""

_AT_ONCE_ON_GPU = 16 * AT_ONCE


class MakeBucket(Protocol):
    """What makes a Bucket, as its class does."""

    def __call__(
        self,
        layout: BucketLayout,
        dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        trained: bool,
        store: Store | None,
        /,
    ) -> Bucket:
        """Return a new bucket with the arguments of `Bucket`."""


def bucket_maker(layers: Iterable[torch.nn.Module]) -> MakeBucket:
    """Of buckets for the parameters of some layers, as their products want them gathered."""
    products = [product for product in products_in_8_bits(layers) if product.gathered]

    def make(layout: BucketLayout, *others: Any) -> Bucket:
        here = {segment.parameter for segment in layout.segments}
        own = [product for product in products if product.weights[0] in here]
        if layout.sharding.zero < 3 or not own:
            return Bucket(layout, *others)
        return EightBitBucket(own, layout, *others)

    return make


class _Packed:
    """Some `segments` of a bucket behind each other, those in `aligned` from a multiple of UNIT on.

    Each rank's share of them lies between two neighbouring `borders`; `places` are the segments' first
    elements.
    """

    def __init__(
        self, layout: BucketLayout, segments: Sequence[BucketSegment], aligned: Sequence[object] = ()
    ) -> None:
        self.segments, self.places, self.length = segments, list[int](), 0
        firsts = set(map(id, aligned))
        for segment in segments:
            if id(segment.parameter) in firsts:
                self.length = -(-self.length // UNIT) * UNIT
            self.places.append(self.length)
            self.length += segment.length
        self.borders = [self._place(border) for border in layout.borders]
        self.own = slice(*self.borders[layout.sharding.group.rank :][:2])

    @property
    def sizes(self) -> list[int] | None:
        """Elements of each rank's share; None where all are as long."""
        sizes = [stop - start for start, stop in pairwise(self.borders)]
        return sizes if len(set(sizes)) > 1 else None

    def _place(self, border: int) -> int:
        """Where what lies before a place in the bucket ends."""
        end = 0
        for segment, place in zip(self.segments, self.places, strict=True):
            if segment.start < border:
                end = place + min(border - segment.start, segment.length)
        return end


class EightBitBucket(Bucket):
    """A Bucket, cut by ZeRO-3, of which the weights of `products` are gathered in 8 bits.

    As long as not all of them know their weights' scale, as in the first step of delayed scaling, everything
    is gathered as it is; its memory then serves in other steps, too.
    """

    def __init__(self, products: Sequence[QuantizedMatmul], layout: BucketLayout, *others: Any) -> None:
        self.products = products
        numbers = {weight: number for number, product in enumerate(products) for weight in product.weights}
        matrices = [segment for segment in layout.segments if segment.parameter in numbers]
        rest = [segment for segment in layout.segments if segment.parameter not in numbers]
        self._numbers = [numbers[segment.parameter] for segment in matrices]
        self._matrices = _Packed(layout, matrices, [product.weights[0] for product in products])
        self._rest = _Packed(layout, rest)
        self._given: list[PrequantizedWeights] = []  # of what is under way or there, but for their values
        super().__init__(layout, *others)

    @override
    def start_gather(self) -> Work[Tensor]:
        maxima = [product.weight_maxima for product in self.products]
        known = [each for each in maxima if each is not None]
        if len(known) < len(maxima):
            self._given = []
            return super().start_gather()
        own, whole = self._own_in_memory(), self._take()
        self._cast(own, whole, [scales_of(each, E4M3) for each in known])
        self.drop_fetched()
        group = self.sharding.group
        works = [
            group.start_all_gather(part[packed.own], part, packed.sizes)
            for packed, part in self._parts(whole)
            if packed.length
        ]
        return CombinedWork(works, whole)

    @override
    def hide_values(self) -> None:
        for product in self.products:
            product.give_weights(None)
        super().hide_values()

    def _show(self, whole: Tensor) -> None:
        if not self._given:
            super()._show(whole)
            return
        (matrices, codes), (rest, others) = self._parts(whole)
        for segment, place in zip(rest.segments, rest.places, strict=True):
            view = others[place : place + segment.length]
            segment.parameter.data = view.view(segment.parameter.shape)
        for number, (product, given) in enumerate(zip(self.products, self._given, strict=True)):
            first = matrices.places[self._numbers.index(number)]
            rows = sum(weight.shape[0] for weight in product.weights)
            shape = rows, product.weights[0].shape[1]
            values = codes[first : first + shape[0] * shape[1]].view(shape).view(E4M3.dtype)
            found = QuantizedTensor(values, given.found.scales, given.found.blocks)
            product.give_weights(PrequantizedWeights(found, given.counts))

    def _take(self) -> Tensor:
        """Memory for what is gathered: of delayed scaling, what its first step takes."""
        if any(product.recipe.delayed for product in self.products):
            return self.sharding.pool.take(self.length, self.dtype)
        return self.sharding.pool.take(self._bytes, torch.uint8)

    @property
    def _bytes(self) -> int:
        return self._rest_begins + self._rest.length * self.dtype.itemsize

    @property
    def _rest_begins(self) -> int:
        return -(-self._matrices.length // UNIT) * UNIT

    def _parts(self, whole: Tensor) -> tuple[tuple[_Packed, Tensor], tuple[_Packed, Tensor]]:
        """The matrices, as bytes, and the rest, in the memory of what is gathered."""
        every = whole.view(torch.uint8)
        assert len(every) >= self._bytes
        rest = every[self._rest_begins : self._bytes].view(self.dtype)
        return (self._matrices, every[: self._matrices.length]), (self._rest, rest)

    def _cast(self, own: Tensor, whole: Tensor, scales: Sequence[Tensor]) -> None:
        """This rank's share of what is gathered, and what is to be known of it."""
        (matrices, codes), (rest, others) = self._parts(whole)
        places = dict(zip((id(s.parameter) for s in rest.segments), rest.places, strict=True))
        of_matrices = zip(self._numbers, matrices.places, strict=True)
        cast = dict(zip((id(s.parameter) for s in matrices.segments), of_matrices, strict=True))
        watching = self.products[0].groups.noted.watching
        largest = [torch.zeros(1, device=own.device) for _ in self.products]
        counts = [torch.zeros(3, dtype=torch.int64, device=whole.device) for _ in self.products]
        for segment, elements, offset in self.owned(own):
            count, key = elements.numel(), id(segment.parameter)
            if not count:
                continue
            if key in places:
                others[places[key] + offset :][:count].copy_(elements, non_blocking=True)
                continue
            number, place = cast[key]
            into = codes[place + offset :][:count].view(E4M3.dtype)
            _cast_into(into, elements, scales[number].view(1))
            if self.products[number].recipe.delayed:
                largest[number] = torch.maximum(largest[number], agreed_maximum(elements.abs().amax()))
            if watching:
                found = QuantizedTensor(into.view(1, -1), scales[number], ScaleBlocks())
                counts[number] += lost(elements.to(into.device).view(1, -1), found)
        for product, most in zip(self.products, largest, strict=True):
            product.note_weights(most)
        self._given = [
            PrequantizedWeights(QuantizedTensor(codes[:0], scale, ScaleBlocks()), count if watching else None)
            for scale, count in zip(scales, counts, strict=True)
        ]


def _cast_into(into: Tensor, values: Tensor, scale: Tensor) -> None:
    """As Scaling does it, some elements after others."""
    step = AT_ONCE if into.is_cpu else _AT_ONCE_ON_GPU
    for codes, some in zip(into.split(step), values.split(step), strict=True):
        some = some.to(into.device, non_blocking=True)  # noqa: PLW2901
        codes.view(torch.uint8).copy_(to_format(some / scale, E4M3).view(torch.uint8))
