"""How many blocks ranks have of buckets, told of all by one: as each of them says by itself."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.plan.rehearse.bucket_shares import BucketShares
from hpctrain.plan.rehearse.rank_programmes import RankProgrammes
from hpctrain.plan.rehearse.rank_step import RankStep
from tests.engines import small_deck

RANKS, VOCABULARY = 16, 61
MUON = ("optimizer.name=muon", "layout.tensor=2", "model.layers=3", "batch.global_size=16")


def step_of(keys: tuple[str, ...], rank: int) -> tuple[RankStep, dict[str, int]]:
    found = RankProgrammes(small_deck(*keys), RANKS, VOCABULARY, 8)
    return found._new_step(0, rank), found.sizes


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_ranks_that_look_alike_have_as_many_blocks(zero: int) -> None:
    """And only these."""
    keys = (*MUON, f"layout.zero={zero}")
    counts = []
    for rank in range(RANKS):
        own = []
        for bucket in step_of(keys, rank)[0].stage.buckets:
            for segment in bucket.layout.segments:
                first, last = max(segment.start, bucket.owned_slice.start), segment.start + segment.length
                elements, block = (
                    max(0, min(last, bucket.owned_slice.stop) - first),
                    segment.parameter.update_block,
                )
                own.append(0 if block is None else elements // block.elements(segment.parameter.shard))
        counts.append(tuple(own))
    signatures = BucketShares(*step_of(keys, 0)).signatures(np.arange(RANKS)).tolist()
    # Layers of one shape may change places.
    alike = {(signature, sum(own)) for signature, own in zip(signatures, counts, strict=True)}
    assert len(alike) == len(set(signatures)) > 1
    assert len(set(signatures)) <= len(set(counts))


def test_without_blocks_all_look_alike() -> None:
    signatures = BucketShares(*step_of(("layout.zero=1", "batch.global_size=32"), 0)).signatures(
        np.arange(RANKS)
    )
    assert set(signatures.tolist()) == {0}


def test_in_the_share_of_one_rank_parameters_end_and_padding_begins() -> None:
    keys = ("layout.zero=1", "layout.tensor=2", "batch.global_size=16")
    of_first, sizes = step_of(keys, 1)
    ends = set(BucketShares(of_first, sizes).ends(1))
    assert len(ends) > 1
    for number, bucket in enumerate(of_first.stage.buckets):
        used = bucket.layout.segments[-1].start + bucket.layout.segments[-1].length
        shares = [step_of(keys, rank)[0].stage.buckets[number].owned_slice for rank in ends]
        assert any(own.start < used <= own.stop for own in shares)
    # They have the same place along tensor as the rank that asks.
    assert {rank % 2 for rank in ends} == {1}
