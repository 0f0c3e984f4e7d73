"""Shares of buckets that ranks own, because of which ranks may make different calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np

from hpctrain.plan.rehearse.call_recorder import membership
from hpctrain.plan.rehearse.programme import Membership, Numbers
from hpctrain.plan.rehearse.rank_step import RankStep
from hpctrain.sharding.bucket_layout import BucketLayout

ENDS_OF_BUCKET = 3
"""Number of parameters of a bucket, in addition to the last one, whose ends `ends` considers."""


class BucketShares:
    """Shares of the buckets of a stage.

    Args:
        step: A rank of the stage.
        sizes: Size of each axis of the mesh.
    """

    def __init__(self, step: RankStep, sizes: Mapping[str, int]) -> None:
        self._cut: list[tuple[BucketLayout, Membership]] = []
        memberships: dict[str, Membership] = {}
        for bucket in step.stage.buckets:
            group = bucket.sharding.group
            if group.size > 1:
                name = step.recorder.groups[group.calls].name
                if name not in memberships:
                    memberships[name] = membership(name, sizes)
                self._cut.append((bucket.layout, memberships[name]))

    def signatures(self, ranks: Numbers) -> Numbers:
        """Return a number for each rank, equal for ranks that own equal numbers of equal blocks, [ranks]."""
        signatures = [np.zeros(len(ranks), dtype=np.int64)]
        for layout, groups in self._cut:
            known: dict[object, int] = {}
            numbers = np.array([known.setdefault(each, len(known)) for each in _blocks(layout)])
            signatures.append(np.where(groups.row_of < 0, -1, numbers[groups.place_of])[ranks])
        return np.unique(np.stack(signatures, axis=1), axis=0, return_inverse=True)[1].reshape(-1)

    def ends(self, rank: int) -> Iterator[int]:
        """Yield the ranks, of the groups of `rank`, in whose shares some parameters of each bucket end."""
        for layout, groups in self._cut:
            stops = [segment.start + segment.length for segment in layout.segments]
            for stop in (*stops[:: max(1, len(stops) // ENDS_OF_BUCKET)], stops[-1]):
                place = np.searchsorted(layout.borders, stop - 1, side="right") - 1
                yield int(groups.group_of(rank)[place])


def _blocks(layout: BucketLayout) -> list[frozenset[tuple[tuple[int, ...], int]]]:
    """Return the blocks of each share: how many it has of each shape."""
    shares = [Counter[tuple[int, ...]]() for _ in pairwise(layout.borders)]
    for segment in layout.segments:
        shard, block = segment.parameter.shard, segment.parameter.update_block
        if block is None:
            continue
        starts = np.arange(segment.start, segment.start + segment.length, block.elements(shard))
        for place in (np.searchsorted(layout.borders, starts, side="right") - 1).tolist():
            shares[place][block.shape] += 1
    return [frozenset(counts.items()) for counts in shares]
