"""Fragments of a model that replicas synchronize in different steps (Streaming DiLoCo, arXiv 2501.18512)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from hpctrain.parallel.shards import Parameter
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketSegment


@dataclass(frozen=True)
class FragmentRange:
    """Neighbouring elements of a bucket that this rank owns and that belong to one fragment.

    Attributes:
        bucket: Number of the bucket.
        span: The elements, counted from the first that this rank owns.
        lengths: Number of elements of each parameter, including the padding that follows it.
        norm_slices: Elements that this rank adds to norms, counted from the start of `span`. Each replica
            adds its own.
        exact: True if the elements are exchanged in fp32. This is so for tied embeddings: the two pipeline
            stages that hold them have different neighbours, and must get the same bits.
    """

    bucket: int
    span: slice
    lengths: tuple[int, ...]
    norm_slices: tuple[slice, ...]
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

    @property
    def offsets(self) -> list[int]:
        """For each fragment, how many updates later than fragment 0 it is synchronized."""
        return [fragment * self.local_steps // self.fragments for fragment in range(self.fragments)]

    def begin(self, updates: int) -> list[int]:
        """Return the fragments whose synchronization starts after this number of updates."""
        offsets = enumerate(self.offsets if updates > self.warmup else ())
        return [fragment for fragment, offset in offsets if (updates - offset) % self.local_steps == 0]

    def due(self, updates: int) -> list[int]:
        """Return the fragments whose synchronization takes effect after this number of updates."""
        return self.begin(updates - self.delay)

    def updates_since_sync(self, updates: int) -> list[int]:
        """Return, for each fragment, the number of updates since the one that was synchronized last.

        A synchronization counts if it has taken effect. If any number is positive at the end of a run, the
        replicas still differ.

        Args:
            updates: Number of updates of the run so far.
        """
        last = updates - self.delay
        last_syncs = (last - (last - offset) % self.local_steps for offset in self.offsets)
        warmup_end = min(self.warmup, updates)
        return [updates - (each if each > self.warmup else warmup_end) for each in last_syncs]


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

    def kind(piece: tuple[BucketSegment, int, int]) -> tuple[int, bool] | None:
        """Return the fragment of some elements, and if they are exchanged in fp32; None if not trained."""
        segment = piece[0]
        if not segment.parameter.requires_grad:
            return None
        return blocks.get(segment.parameter, 0) % count, segment.replication.tied_pipeline is not None

    fragments: list[list[FragmentRange]] = [[] for _ in range(count)]
    for number, bucket in enumerate(buckets):
        for key, group in groupby(_owned_segments(bucket), kind):
            if key is None:
                continue
            fragment, exact = key
            segments, starts, stops = zip(*group, strict=True)
            lengths = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
            span = slice(starts[0], stops[-1])
            norm_slices = tuple(_norm_slices(bucket, segments, span))
            fragments[fragment].append(FragmentRange(number, span, lengths, norm_slices, exact))
    return fragments


def _owned_segments(bucket: Bucket) -> Iterator[tuple[BucketSegment, int, int]]:
    """Yield the segments that this rank owns elements of, and begin and end among its elements.

    Padding belongs to the segment before it, and that at the start to the first one.
    """
    owned = bucket.owned_slice
    segments = [
        segment
        for segment in bucket.segments
        if max(segment.start, owned.start) < min(segment.start + segment.length, owned.stop)
    ]
    if segments:
        borders = [0, *(segment.start - owned.start for segment in segments[1:]), owned.stop - owned.start]
        for segment, (start, stop) in zip(segments, pairwise(borders), strict=True):
            yield segment, start, stop


def _norm_slices(bucket: Bucket, segments: Sequence[BucketSegment], span: slice) -> Iterator[slice]:
    """Yield the elements of the segments of a span that this rank adds to norms of its replica."""
    sharding, share, start = bucket.sharding, bucket.slice, bucket.owned_slice.start + span.start
    for segment in segments:
        first = max(segment.start, share.start)
        last = min(segment.start + segment.length, share.stop)
        position, _ = segment.replication.holder_position(False, sharding.group, sharding.replicas)
        if first < last and position == 0:
            yield slice(first - start, last - start)
