"""Fragments of a model that replicas synchronize in different steps (Streaming DiLoCo, arXiv 2501.18512)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hpctrain.parallel.shards import Parameter
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketSegment

Kind = tuple[int, bool]
"""Fragment of some elements, and True if they are exchanged in fp32."""


@dataclass(frozen=True)
class FragmentRange:
    """Neighbouring elements of a bucket that this rank owns and that belong to one fragment.

    Attributes:
        bucket: Number of the bucket.
        span: The elements, counted from the first that this rank owns.
        lengths: Number of elements of each parameter, including the padding that follows it.
        counted: Parts of `span` that this rank counts; each replica counts its own.
        exact: True if the elements are exchanged in fp32. This is so for tied embeddings: the two pipeline
            stages that hold them have different neighbours, and must get the same bits.
    """

    bucket: int
    span: slice
    lengths: tuple[int, ...]
    counted: tuple[slice, ...]
    exact: bool


@dataclass(frozen=True)
class FragmentSchedule:
    """Numbers of updates after which fragments are synchronized.

    Each fragment is synchronized once in `local_steps` updates, and takes effect `delay` updates later. The
    fragments follow each other at distances of `local_steps` / `fragments` updates. None is synchronized in
    the first `warmup` updates.

    Example: with `local_steps` 6, `fragments` 2 and `delay` 1, fragment 0 starts after the updates 6, 12,
    ..., fragment 1 after 3, 9, ...; they take effect after 7, 13, ... and 4, 10, ...
    """

    local_steps: int
    fragments: int = 1
    delay: int = 0
    warmup: int = 0

    def begin(self, updates: int) -> list[int]:
        """Return the fragments whose synchronization starts after this number of updates."""
        return [
            fragment
            for fragment in range(self.fragments)
            if updates > self.warmup
            and (updates - fragment * self.local_steps // self.fragments) % self.local_steps == 0
        ]

    def due(self, updates: int) -> list[int]:
        """Return the fragments whose synchronization takes effect after this number of updates."""
        return self.begin(updates - self.delay)

    def updates_since_sync(self, updates: int) -> list[int]:
        """Return, for each fragment, the number of updates that no completed synchronization includes."""
        last = updates - self.delay
        firsts = (fragment * self.local_steps // self.fragments for fragment in range(self.fragments))
        met = (last - (last - first) % self.local_steps for first in firsts)
        together = min(self.warmup, updates)
        return [updates - (each if each > self.warmup else together) for each in met]


def fragments_of(
    buckets: Sequence[Bucket], blocks: Mapping[Parameter, int], count: int
) -> list[list[FragmentRange]]:
    """Return the ranges of each of `count` fragments. Local.

    Block i belongs to fragment i modulo `count`, everything else to fragment 0. So a fragment is the same on
    every layout. Parameters that are not trained never differ, and belong to none.

    Args:
        buckets: Buckets of this rank.
        blocks: Number of the block of each parameter that is in one.
        count: Number of fragments.
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
        stops = [starts[0] for _, starts, _ in runs[1:]] + [
            bucket.owned_slice.stop - bucket.owned_slice.start
        ] * bool(runs)
        for (kind, starts, segments), stop in zip(runs, stops, strict=True):
            if kind is not None:
                counted = tuple(_counted(bucket, segments))
                lengths = tuple(end - start for start, end in pairwise((*starts, stop)))
                piece = FragmentRange(number, slice(starts[0], stop), lengths, counted, kind[1])
                fragments[kind[0]].append(piece)
    return fragments


def _owned(bucket: Bucket) -> Iterator[tuple[BucketSegment, int]]:
    """Yield the segments that this rank owns elements of, with their first index among its elements."""
    owned = bucket.owned_slice
    for segment in bucket.segments:
        first = max(segment.start, owned.start)
        last = min(segment.start + segment.length, owned.stop)
        if first < last:
            yield segment, first - owned.start


def _counted(bucket: Bucket, segments: Sequence[BucketSegment]) -> Iterator[slice]:
    """Yield the elements of these segments that this rank counts for its replica."""
    sharding, owned, share = bucket.sharding, bucket.owned_slice, bucket.slice
    for segment in segments:
        first = max(segment.start, share.start)
        last = min(segment.start + segment.length, share.stop)
        if first < last and segment.replication.copy(False, sharding.group, sharding.replicas)[0] == 0:
            yield slice(first - owned.start, last - owned.start)
