"""The fragments of a model that replicas synchronize in different steps (arXiv 2501.18512)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hpctrain.parallel.shard import Parameter
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketSegment

Kind = tuple[int, bool]
"""The fragment of some elements, and whether they travel in fp32."""


@dataclass(frozen=True)
class FragmentRange:
    """Neighbouring elements `span` of what is this rank's own of a bucket, by its number among all.

    `lengths` are those of each parameter, with what fills up behind it; `counted` are the spans that this
    rank counts, where each replica counts its own. What is `exact` travels in fp32: of tied embeddings the
    two stages of a pipeline that hold them hold other neighbours, and are to get the same bits.
    """

    bucket: int
    span: slice
    lengths: tuple[int, ...]
    counted: tuple[slice, ...]
    exact: bool


@dataclass(frozen=True)
class FragmentSchedule:
    """When fragments are synchronized, by how many updates there were.

    Every fragment once in `local_steps` updates, one `local_steps` / `fragments` after the other, each to
    take effect `delay` updates later. None in the first `warmup`.
    """

    local_steps: int
    fragments: int = 1
    delay: int = 0
    warmup: int = 0

    def begin(self, updates: int) -> list[int]:
        """The fragments whose synchronization begins after so many updates."""
        return [
            fragment
            for fragment in range(self.fragments)
            if updates > self.warmup
            and (updates - fragment * self.local_steps // self.fragments) % self.local_steps == 0
        ]

    def due(self, updates: int) -> list[int]:
        """Those for which it takes effect then."""
        return self.begin(updates - self.delay)

    def behind(self, updates: int) -> list[int]:
        """Of each fragment, the updates so far that are in no synchronization which has taken effect."""
        last = updates - self.delay
        firsts = (fragment * self.local_steps // self.fragments for fragment in range(self.fragments))
        met = (last - (last - first) % self.local_steps for first in firsts)
        together = min(self.warmup, updates)
        return [updates - (each if each > self.warmup else together) for each in met]


def fragments_of(
    buckets: Sequence[Bucket], blocks: Mapping[Parameter, int], count: int
) -> list[list[FragmentRange]]:
    """The pieces of each of `count` fragments: blocks by their numbers in turns, all else in the first one.

    So a fragment is the same on every layout. Parameters that are not trained never differ, and are in none.
    """
    fragments: list[list[FragmentRange]] = [[] for _ in range(count)]
    for number, bucket in enumerate(buckets):
        runs: list[tuple[Kind | None, list[int], list[BucketSegment]]] = []
        for segment, first in _owned(bucket):
            parameter = segment.parameter
            kind: Kind | None = (blocks.get(parameter, 0) % count, segment.replication.ends is not None)
            if not parameter.requires_grad:
                kind = None
            if not runs or runs[-1][0] != kind:
                runs.append((kind, [], []))
            runs[-1][1].append(first if len(runs) > 1 or runs[-1][1] else 0)
            runs[-1][2].append(segment)
        stops = [starts[0] for _, starts, _ in runs[1:]] + [bucket.own.stop - bucket.own.start] * bool(runs)
        for (kind, starts, segments), stop in zip(runs, stops, strict=True):
            if kind is not None:
                counted = tuple(_counted(bucket, segments))
                lengths = tuple(end - start for start, end in pairwise((*starts, stop)))
                piece = FragmentRange(number, slice(starts[0], stop), lengths, counted, kind[1])
                fragments[kind[0]].append(piece)
    return fragments


def _owned(bucket: Bucket) -> Iterator[tuple[BucketSegment, int]]:
    """The segments of which this rank has own elements, and where these begin among all its own."""
    own = bucket.own
    for segment in bucket.segments:
        first = max(segment.start, own.start)
        last = min(segment.start + segment.length, own.stop)
        if first < last:
            yield segment, first - own.start


def _counted(bucket: Bucket, segments: Sequence[BucketSegment]) -> Iterator[slice]:
    """The elements of these that this rank counts among those of its replica."""
    sharding, own, share = bucket.sharding, bucket.own, bucket.slice
    for segment in segments:
        first = max(segment.start, share.start)
        last = min(segment.start + segment.length, share.stop)
        if first < last and segment.replication.copy(False, sharding.group, sharding.replicas)[0] == 0:
            yield slice(first - own.start, last - own.start)
