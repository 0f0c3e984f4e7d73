"""How the parameters of neighbouring layers lie in buckets, told from their Shards without any memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from torch import Tensor

from hpctrain.parallel.shard import Parameter, UpdateSettings
from hpctrain.sharding.ownership import Grain, UpdateLoads
from hpctrain.sharding.replication import Replication, Replications, ZeroSharding

ALIGNMENT = 64
"""Buckets are padded to a multiple of so many elements times the ranks that share them.

So are the parts of them that are treated alike: every slice of what is updated by element begins and ends
where vector instructions do, and an element's update has the same bits in whatever slice it lies.
"""

_ELEMENT_WORK = 64.0
"""FLOPs that make as long as the update of one element by itself, which is all reading and writing."""


@dataclass(frozen=True)
class BucketSegment:
    """One parameter's elements `start .. start + length` of its bucket, and who else holds them."""

    parameter: Parameter
    start: int
    length: int
    replication: Replication

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat buffer of its bucket, in the parameter's shape."""
        return flat[self.start : self.start + self.length].view(self.parameter.shape)


@dataclass(frozen=True)
class UpdateRange:
    """Neighbouring elements of a bucket that are updated alike."""

    part: slice
    treatment: UpdateSettings


@dataclass(frozen=True)
class BucketLayout:
    """Where parameters lie in a bucket that the ranks of `sharding` share; needs no memory.

    Parameters that are updated alike lie together, in the parts `treated`, which begin at multiples of
    ALIGNMENT and leave nothing out; decayed ones come first. `used` counts the elements of parameters, the
    rest is padding and stays zero. Each rank's share lies between two neighbouring `borders`.
    """

    sharding: ZeroSharding
    segments: tuple[BucketSegment, ...]
    treated: tuple[UpdateRange, ...]
    length: int
    used: int
    borders: tuple[int, ...]

    @property
    def gaps(self) -> list[slice]:
        """The padding."""
        ends = [0, *(segment.start + segment.length for segment in self.segments)]
        starts = [*(segment.start for segment in self.segments), self.length]
        return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    @property
    def trained(self) -> bool:
        """Whether anything of it is."""
        return any(segment.parameter.requires_grad for segment in self.segments)

    @property
    def share(self) -> slice:
        """This rank's share of what is cut."""
        rank = self.sharding.group.rank
        return slice(self.borders[rank], self.borders[rank + 1])

    @property
    def sizes(self) -> list[int] | None:
        """Elements of each rank's share; None where all are as long."""
        sizes = [stop - start for start, stop in pairwise(self.borders)]
        return sizes if len(set(sizes)) > 1 else None

    @property
    def own(self) -> slice:
        """The elements whose optimizer state is this rank's: all where ZeRO cuts nothing, else its slice."""
        return self.share if self.sharding.zero > 0 else slice(0, self.length)

    @property
    def own_treated(self) -> list[UpdateRange]:
        """The parts of the own elements that are updated alike, counted from the first of these."""
        own, parts = self.own, []
        for treated in self.treated:
            first, last = max(treated.part.start, own.start), min(treated.part.stop, own.stop)
            if first < last:
                parts.append(UpdateRange(slice(first - own.start, last - own.start), treated.treatment))
        return parts

    @staticmethod
    def of(
        leaves: Sequence[Sequence[Parameter]],
        sharding: ZeroSharding,
        replications: Replications,
        loads: UpdateLoads | None = None,
    ) -> BucketLayout:
        """Lay out some layers' parameters, all of one ZeroSharding, whose ranks have those `loads` already.

        Decayed before the others, both by rate, what is updated in Blocks first, weights before biases,
        layers with whole gradients before those with partial ones; each layer's parameters of a kind, which
        may be fused, stay behind each other.
        """
        by_kind = sorted(leaves, key=lambda leaf: all(parameter.shard.partial for parameter in leaf))
        parameters = sorted(
            (parameter for leaf in by_kind for parameter in leaf),
            key=lambda parameter: (
                not parameter.decayed,
                parameter.rate,
                parameter.block is None,
                parameter.dim() < 2,
            ),
        )
        segments: list[BucketSegment] = []
        borders: list[int] = []
        treatments: list[UpdateSettings] = []
        start = 0
        for treatment, alike in groupby(parameters, lambda parameter: parameter.treatment):
            start = _round_up(start, ALIGNMENT)
            borders.append(start)
            treatments.append(treatment)
            for parameter in alike:
                replication = replications.of(parameter.shard)
                segments.append(BucketSegment(parameter, start, parameter.shard.elements, replication))
                start += parameter.shard.elements
        used = sum(segment.length for segment in segments)
        length = _round_up(start, ALIGNMENT * sharding.group.size)
        parts = (slice(first, last) for first, last in pairwise([*borders, length]))
        treated = tuple(UpdateRange(part, how) for part, how in zip(parts, treatments, strict=True))
        ranks = sharding.group.size
        shares = (loads or UpdateLoads(ranks)).cut(_grains(segments, length, ranks), length)
        return BucketLayout(sharding, tuple(segments), treated, length, used, shares)


def _grains(segments: Sequence[BucketSegment], length: int, ranks: int) -> list[Grain]:
    """What of a bucket goes to one rank each: Blocks, and aligned runs of what is updated by element.

    Empty where all of it is: then it is cut anywhere.
    """
    if all(segment.parameter.block is None for segment in segments):
        return []
    grains: list[Grain] = []
    start = 0
    for segment in segments:
        block = segment.parameter.block
        if block is None:
            continue
        grains += _runs(start, segment.start, ranks)
        elements, stop = block.elements(segment.parameter.shard), segment.start + segment.length
        work = block.work if segment.parameter.requires_grad else elements * _ELEMENT_WORK
        grains += [Grain(first + elements, work) for first in range(segment.start, stop, elements)]
        start = stop
    return grains + _runs(start, length, ranks)


def _runs(start: int, stop: int, ranks: int) -> list[Grain]:
    """Runs of elements that are updated by themselves, which begin aligned but for padding."""
    step = _round_up(-(-(stop - start) // (4 * ranks)), ALIGNMENT)
    borders = [*range(_round_up(start, ALIGNMENT) + step, stop, step), stop] if start < stop else []
    return [Grain(border, (border - first) * _ELEMENT_WORK) for first, border in pairwise([start, *borders])]


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def bucket_layouts(
    units: Iterable[Sequence[Sequence[Parameter]]],
    replications: Replications,
    bucket_bytes: int,
    frozen_apart: bool = False,
) -> Iterator[BucketLayout]:
    """Cut a model into bucket layouts, in the order of the forward pass.

    `units` are what computes together (a block, the embedding), each a list of layers' parameters; those
    with another ZeroSharding have buckets of their own. With ZeRO-3 every unit is one bucket; else layers
    are joined up to about `bucket_bytes` of fp32 gradients. A layer is never cut; one larger than that is a
    bucket of its own. With `frozen_apart` what is not trained lies in others than what is.
    """
    pending: dict[_Alike, list[Sequence[Parameter]]] = {}
    loads: dict[ZeroSharding, UpdateLoads] = {}

    def layout(leaves: Sequence[Sequence[Parameter]], sharding: ZeroSharding) -> BucketLayout:
        load = loads.setdefault(sharding, UpdateLoads(sharding.group.size))
        return BucketLayout.of(leaves, sharding, replications, load)

    for unit in units:
        for alike, leaves in _by_sharding(unit, replications, frozen_apart).items():
            sharding, _ = alike
            if sharding.zero == 3:
                yield layout(leaves, sharding)
                continue
            joined = pending.setdefault(alike, [])
            for leaf in leaves:
                elements = sum(parameter.shard.elements for each in (*joined, leaf) for parameter in each)
                if joined and 4 * elements > bucket_bytes:
                    yield layout(joined, sharding)
                    joined.clear()
                joined.append(leaf)
    for (sharding, _), joined in pending.items():
        yield layout(joined, sharding)


_Alike = tuple[ZeroSharding, bool]
"""What the parameters of a bucket have in common; the latter is whether they are trained, if that counts."""


def _by_sharding(
    unit: Sequence[Sequence[Parameter]], replications: Replications, frozen_apart: bool
) -> dict[_Alike, list[Sequence[Parameter]]]:
    """The layers of a unit, each as far as it has the same ZeroSharding."""
    sorted_out: dict[_Alike, list[Sequence[Parameter]]] = {}
    for leaf in unit:
        alike: dict[_Alike, list[Parameter]] = {}
        for parameter in leaf:
            sharding = replications.of(parameter.shard).sharding
            alike.setdefault((sharding, parameter.requires_grad or not frozen_apart), []).append(parameter)
        for each, parameters in alike.items():
            sorted_out.setdefault(each, []).append(parameters)
    return sorted_out
