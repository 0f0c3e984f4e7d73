"""Places of parameters in buckets, computed from their Shards without any memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from torch import Tensor

from hpctrain.parallel.shards import Parameter, UpdateSettings
from hpctrain.sharding.ownership import UpdateLoads, UpdateUnit
from hpctrain.sharding.replication import Replication, Replications, ZeroSharding

ALIGNMENT = 64
"""Buckets are padded to a multiple of this number of elements, times the number of ranks that share them.

The ranges with the same update settings are aligned to it, too. So every slice that is updated element by
element begins and ends at a boundary of vector instructions, and the bits of an element's update do not
depend on the slice that it belongs to.
"""

ELEMENT_WORK = 64.0
"""Work of an elementwise update of one element, in FLOPs of matrix products that take as long.

Such an update is limited by the bandwidth of the memory.
"""


@dataclass(frozen=True)
class BucketSegment:
    """Elements of a bucket that belong to one parameter, and the ranks that hold them.

    Attributes:
        parameter: The parameter.
        start: Index of its first element in the bucket.
        length: Number of its elements.
        replication: Ranks that hold the same piece.
    """

    parameter: Parameter
    start: int
    length: int
    replication: Replication

    def view(self, flat: Tensor) -> Tensor:
        """Return the parameter's elements of a flat buffer of its bucket, in the parameter's shape."""
        return flat[self.start : self.start + self.length].view(self.parameter.shape)


class UpdateRange(NamedTuple):
    """Neighbouring elements of a bucket that have the same update settings."""

    part: slice
    update_settings: UpdateSettings


@dataclass(frozen=True)
class BucketLayout:
    """Places of parameters in a bucket that the ranks of `sharding` share. It needs no memory.

    Attributes:
        sharding: How the bucket is split among ranks.
        segments: Places of the parameters, in their order.
        update_ranges: Ranges with the same update settings. They begin at multiples of ALIGNMENT and cover
            the bucket. Those with weight decay come first.
        length: Number of elements, including the padding, which remains zero.
        used_length: Number of elements that belong to parameters.
        borders: Boundaries of the ranks' shares: rank r has the elements `borders[r]` to `borders[r + 1] -
            1`.
    """

    sharding: ZeroSharding
    segments: tuple[BucketSegment, ...]
    update_ranges: tuple[UpdateRange, ...]
    length: int
    used_length: int
    borders: tuple[int, ...]

    @property
    def gaps(self) -> list[slice]:
        """Parts of the bucket that are padding."""
        ends = [0, *(segment.start + segment.length for segment in self.segments)]
        starts = [*(segment.start for segment in self.segments), self.length]
        return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    @property
    def trained(self) -> bool:
        """True if any of the parameters is trained."""
        return any(segment.parameter.requires_grad for segment in self.segments)

    @property
    def share(self) -> slice:
        """Elements that this rank owns if ZeRO splits them."""
        rank = self.sharding.group.rank
        return slice(self.borders[rank], self.borders[rank + 1])

    @property
    def sizes(self) -> list[int] | None:
        """Number of elements of each rank's share; None if all are equal."""
        return share_sizes(self.borders)

    @property
    def owned_slice(self) -> slice:
        """Elements whose optimizer state this rank stores: its share, or everything without ZeRO."""
        return self.share if self.sharding.zero > 0 else slice(0, self.length)

    @property
    def owned_update_ranges(self) -> list[UpdateRange]:
        """Update ranges within `owned_slice`, with indices that count from its first element."""
        parts = ((overlap(each.part, self.owned_slice), each.update_settings) for each in self.update_ranges)
        return [UpdateRange(part, settings) for part, settings in parts if part.start < part.stop]

    @staticmethod
    def of(
        layers: Sequence[Sequence[Parameter]],
        sharding: ZeroSharding,
        replications: Replications,
        loads: UpdateLoads | None = None,
    ) -> BucketLayout:
        """Return the layout of the parameters of some layers, which all have the same ZeroSharding.

        Parameters with weight decay come first; then they are sorted by learning rate. Matrices that are
        updated as a whole precede others, and matrices precede vectors. Layers whose gradients need no sum
        over tensor ranks precede layers that need one. Parameters of the same kind in one layer, which may be
        fused, stay adjacent.

        Args:
            layers: Parameters of each layer.
            sharding: How the bucket is split among ranks.
            replications: Replications of this rank.
            loads: Work that the ranks already have from earlier buckets; it is updated. None means no work.
        """
        by_kind = sorted(layers, key=lambda layer: all(parameter.shard.partial for parameter in layer))
        parameters = sorted((parameter for layer in by_kind for parameter in layer), key=_order)
        segments: list[BucketSegment] = []
        borders: list[int] = []
        all_settings: list[UpdateSettings] = []
        start = 0
        for settings, group in groupby(parameters, lambda parameter: parameter.update_settings):
            start = _round_up(start, ALIGNMENT)
            borders.append(start)
            all_settings.append(settings)
            for parameter in group:
                replication = replications.of(parameter.shard)
                segments.append(BucketSegment(parameter, start, parameter.shard.elements, replication))
                start += parameter.shard.elements
        used = sum(segment.length for segment in segments)
        length = _round_up(start, ALIGNMENT * sharding.group.size)
        parts = (slice(first, last) for first, last in pairwise([*borders, length]))
        ranges = tuple(map(UpdateRange, parts, all_settings))
        ranks = sharding.group.size
        shares = (loads or UpdateLoads(ranks)).cut(_update_units(segments, length, ranks), length)
        return BucketLayout(sharding, tuple(segments), ranges, length, used, shares)


def _order(parameter: Parameter) -> tuple[bool, float, bool, bool]:
    """Return the key by which parameters are sorted in a bucket, see `BucketLayout.of`."""
    decays, in_block = parameter.has_weight_decay, parameter.update_block is not None
    return not decays, parameter.learning_rate_factor, not in_block, parameter.dim() < 2


def overlap(part: slice, within: slice) -> slice:
    """Return the elements that are in both ranges, with indices that count from the first one of `within`.

    Example: elements 10 to 29 within 20 to 39 are 0 to 9. The result may be empty.
    """
    first = min(max(part.start, within.start), within.stop)
    return slice(first - within.start, max(first, min(part.stop, within.stop)) - within.start)


def share_sizes(borders: Sequence[int]) -> list[int] | None:
    """Return the number of elements of each share between neighbouring borders; None if all are equal."""
    sizes = [stop - start for start, stop in pairwise(borders)]
    return sizes if len(set(sizes)) > 1 else None


def _update_units(segments: Sequence[BucketSegment], length: int, ranks: int) -> list[UpdateUnit]:
    """Return the parts of a bucket that must belong to one rank each: matrices, and runs of other elements.

    The list is empty if all elements are updated one by one: then the bucket may be split anywhere.
    """
    if all(segment.parameter.update_block is None for segment in segments):
        return []
    units: list[UpdateUnit] = []
    start = 0
    for segment in segments:
        block = segment.parameter.update_block
        if block is None:
            continue
        units += _runs(start, segment.start, ranks)
        elements, stop = block.elements(segment.parameter.shard), segment.start + segment.length
        work = block.work if segment.parameter.requires_grad else elements * ELEMENT_WORK
        units += [UpdateUnit(first + elements, work) for first in range(segment.start, stop, elements)]
        start = stop
    return units + _runs(start, length, ranks)


def _runs(start: int, stop: int, ranks: int) -> list[UpdateUnit]:
    """Return runs of elements that are updated one by one. They begin at multiples of ALIGNMENT."""
    step = _round_up(-(-(stop - start) // (4 * ranks)), ALIGNMENT)
    borders = [*range(_round_up(start, ALIGNMENT) + step, stop, step), stop] if start < stop else []
    runs = pairwise([start, *borders])
    return [UpdateUnit(end, (end - first) * ELEMENT_WORK) for first, end in runs]


def _round_up(number: int, multiple_of: int) -> int:
    return -(-number // multiple_of) * multiple_of


def bucket_layouts(
    units: Iterable[Sequence[Sequence[Parameter]]],
    replications: Replications,
    bucket_bytes: int,
    separate_frozen: bool = False,
) -> Iterator[BucketLayout]:
    """Yield the bucket layouts of a model, in the order of the forward pass.

    With ZeRO-3 each unit is a bucket. Otherwise layers are joined up to about `bucket_bytes` of fp32
    gradients. A layer is never split: a larger one is a bucket of its own. Parameters with different
    ZeroShardings are in different buckets.

    Args:
        units: Parameters of each layer of each unit. A unit is the layers that ZeRO-3 gathers together, such
            as a block or the embedding.
        replications: Replications of this rank.
        bucket_bytes: Largest size of the fp32 gradients of joined layers.
        separate_frozen: True if parameters that are not trained are in buckets of their own.
    """
    pending: dict[_BucketKey, list[Sequence[Parameter]]] = {}
    loads: dict[ZeroSharding, UpdateLoads] = {}

    def layout(layers: Sequence[Sequence[Parameter]], sharding: ZeroSharding) -> BucketLayout:
        load = loads.setdefault(sharding, UpdateLoads(sharding.group.size))
        return BucketLayout.of(layers, sharding, replications, load)

    for unit in units:
        for key, layers in _by_sharding(unit, replications, separate_frozen).items():
            sharding, _ = key
            if sharding.zero == 3:
                yield layout(layers, sharding)
                continue
            joined = pending.setdefault(key, [])
            for layer in layers:
                elements = sum(parameter.shard.elements for each in (*joined, layer) for parameter in each)
                if joined and 4 * elements > bucket_bytes:
                    yield layout(joined, sharding)
                    joined.clear()
                joined.append(layer)
    for (sharding, _), joined in pending.items():
        yield layout(joined, sharding)


_BucketKey = tuple[ZeroSharding, bool]
"""Properties that all parameters of a bucket share: ZeroSharding, and True if they are trained or it is
irrelevant.
"""


def _by_sharding(
    unit: Sequence[Sequence[Parameter]], replications: Replications, separate_frozen: bool
) -> dict[_BucketKey, list[Sequence[Parameter]]]:
    """Return the layers of a unit by the properties that the parameters of a bucket share.

    A unit is the layers that ZeRO-3 gathers together.
    """
    layers_by_key: dict[_BucketKey, list[Sequence[Parameter]]] = {}
    for layer in unit:
        by_key: dict[_BucketKey, list[Parameter]] = {}
        for parameter in layer:
            key = replications.of(parameter.shard).sharding, parameter.requires_grad or not separate_frozen
            by_key.setdefault(key, []).append(parameter)
        for key, parameters in by_key.items():
            layers_by_key.setdefault(key, []).append(parameters)
    return layers_by_key
