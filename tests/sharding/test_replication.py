"""All ranks together hold, sum, count and write each slice of each piece of a tensor once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import pytest

from hpctrain.comm.group import Group
from hpctrain.comm.ledger import Ledger
from hpctrain.comm.planned import planned_group
from hpctrain.parallel.shards import Shard
from hpctrain.sharding.replication import Replication, Replications, ZeroSharding

SIZES = {"pipeline": 2, "data": 2, "context": 2, "tensor": 4}
RANKS = [dict(zip(SIZES, place, strict=True)) for place in product(*map(range, SIZES.values()))]

EXPERT_SIZES = {"expert_data": 2, "expert": 4, "expert_tensor": 2}
"""How experts fold the ranks of a stage."""


def along(place: dict[str, int]) -> dict[str, int]:
    """Return a rank's coordinates along the axes of both arrangements."""
    rank = (place["data"] * SIZES["context"] + place["context"]) * SIZES["tensor"] + place["tensor"]
    places = product(*map(range, EXPERT_SIZES.values()))
    return place | dict(zip(EXPERT_SIZES, list(places)[rank], strict=True))


@dataclass(frozen=True)
class MeshAt:
    """Mesh from the view of one of its ranks, without ranks."""

    place: tuple[tuple[str, int], ...]
    made: dict[tuple[str, ...], Group]

    def group(self, *axes: str) -> Group:
        if axes not in self.made:
            rank = 0
            for axis in axes:
                rank = rank * (SIZES | EXPERT_SIZES)[axis] + along(dict(self.place))[axis]
            size = prod((SIZES | EXPERT_SIZES)[axis] for axis in axes)
            self.made[axes] = planned_group(axes, rank, size, Ledger())
        return self.made[axes]

    def new_subgroup(self, axis: str, size: int | Sequence[int]) -> Group:
        size = size if isinstance(size, int) else size[0]
        return planned_group((axis,), along(dict(self.place))[axis] % size, size, Ledger())


def replication(place: dict[str, int], shard: Shard, zero: int, parts: int) -> Replication:
    """Return a rank's Replication if ZeRO splits over `1 / parts` of the ranks with other tokens."""

    def cut(everyone: Group) -> ZeroSharding:
        size = everyone.size // parts
        ranks = planned_group(everyone.axes, everyone.rank % size, size, Ledger())
        return ZeroSharding(zero, ranks, planned_group(("replicas",), everyone.rank // size, parts, Ledger()))

    return Replications(MeshAt(tuple(place.items()), {}), cut).of(shard)


def shards(place: dict[str, int]) -> dict[str, tuple[Shard, int]]:
    """Return the kinds of parameters of a rank, each with the number of its piece."""
    tensor, last, here = place["tensor"], place["pipeline"], along(place)
    experts = frozenset({"expert", "expert_tensor"})
    start = (2 * here["expert"], 4 * here["expert_tensor"])
    split = frozenset({"tensor"})
    return {
        "matrix": (Shard("m", (8,), (2 * tensor,), (2,), split), tensor),
        "norm": (Shard.replicated("n", (8,), frozenset({"tensor"})), 0),
        "shared keys": (Shard("k", (8,), (tensor // 2 * 4,), (4,), split, split, (2, 2)), tensor // 2),
        "tied": (Shard("t", (8,), (2 * tensor,), (2,), split, stage_copy=last, stage_copies=2), tensor),
        "experts": (Shard("e", (8, 8), start, (2, 4), experts), 2 * here["expert"] + here["expert_tensor"]),
    }


@pytest.mark.parametrize("kind", ["matrix", "norm", "shared keys", "tied", "experts"])
@pytest.mark.parametrize(("zero", "parts"), [(0, 1), (1, 1), (3, 1), (3, 2)])
def test_one_rank_counts_each_slice_and_copies_are_numbered(kind: str, zero: int, parts: int) -> None:
    counted: Counter[tuple[int, ...]] = Counter()
    copies: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for place in RANKS:
        shard, piece = shards(place)[kind]
        own = replication(place, shard, zero, parts)
        stage = 0 if kind == "tied" else place["pipeline"]
        counted[stage, piece, own.sharding.group.rank] += own.counts_slice
        if own.writes_checkpoint:
            slice_of = own.sharding.group.rank if zero else 0
            copies.setdefault((stage, piece, slice_of), []).append(own.holder_position(True))
        assert own.holders.size == {"norm": 4, "shared keys": 2}.get(kind, 1)
        assert own.partial == (kind in {"norm", "shared keys"})
        assert (own.tied_pipeline is not None) == (kind == "tied")
    # Each piece has an owner of each of its slices, on each stage that has it.
    pieces = {"matrix": 4, "norm": 1, "shared keys": 2, "tied": 4, "experts": 8}[kind]
    assert len(counted) == (1 if kind == "tied" else 2) * pieces * (2 if kind == "experts" else 4) // parts
    assert set(counted.values()) == {1}
    for numbers in copies.values():
        assert sorted(numbers) == [(number, len(numbers)) for number in range(len(numbers))]


def test_experts_are_summed_over_all_ranks_of_a_stage_that_hold_them() -> None:
    for place in RANKS:
        answers = Replications(MeshAt(tuple(place.items()), {}), lambda group: ZeroSharding(0, group, group))
        own = answers.of(shards(place)["experts"][0])
        assert own.sharding.group.axes == ("expert_data",)
        assert own.pieces is not None and own.pieces.axes == ("expert_tensor",)
        assert own.tied_pipeline is None
        dense = answers.of(Shard.replicated("w", (8,)))
        assert dense.sharding is not own.sharding
        other = Shard("f", (8,), (0,), (4,), frozenset({"expert", "expert_tensor"}))
        assert answers.of(other).sharding is own.sharding


def test_parameters_split_over_an_axis_are_summed_over_the_other_axes() -> None:
    """The parameter is then in buckets of another ZeroSharding."""
    place = dict.fromkeys(SIZES, 0)
    answers = Replications(
        MeshAt(tuple(place.items()), {}), lambda everyone: ZeroSharding(0, everyone, everyone)
    )
    cut = answers.of(Shard("e", (8,), (0,), (4,), frozenset({"data"})))
    whole = answers.of(Shard.replicated("w", (8,)))
    assert (cut.sharding.group.axes, whole.sharding.group.axes) == (("context",), ("data", "context"))
    assert answers.of(Shard.replicated("v", (8,))).sharding is whole.sharding


def test_one_of_the_ranks_with_the_same_tokens_counts_them() -> None:
    for place in RANKS:
        answers = Replications(
            MeshAt(tuple(place.items()), {}), lambda everyone: ZeroSharding(0, everyone, everyone)
        )
        assert answers.counts_tokens == (place["tensor"] == 0)
