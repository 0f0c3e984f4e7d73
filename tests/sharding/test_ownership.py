"""Ranks own whole blocks of a bucket, each element has one owner, and the work is spread evenly."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hpctrain.comm.ledger import Ledger
from hpctrain.comm.planned import planned_group
from hpctrain.parallel.shards import Parameter, Shard, UpdateBlock
from hpctrain.sharding.bucket_layout import ALIGNMENT, BucketLayout, bucket_layouts
from hpctrain.sharding.ownership import UpdateLoads, UpdateUnit
from hpctrain.sharding.replication import MeshQueries, Replications, ZeroSharding

H = 48
SHAPES = {"q": (H, H), "k": (H, H), "v": (H, H), "out": (H, H), "up": (4 * H, H), "down": (H, 4 * H)}


def work(rows: int, columns: int) -> float:
    """Return FLOPs of products that count rows twice."""
    return float(min(rows, columns) * rows * columns)


def blocks(count: int) -> list[list[list[Parameter]]]:
    """Return units of transformer blocks with whole matrices and norms, and experts of one tensor."""
    units = []
    for _ in range(count):
        leaves = [[Parameter(Shard.replicated("norm", (H,)), has_weight_decay=False)]]
        for name, shape in SHAPES.items():
            matrix = Parameter(Shard.replicated(name, shape))
            matrix.update_block = UpdateBlock(shape, work(*shape))
            leaves.append(
                [matrix, Parameter(Shard.replicated(f"{name} bias", shape[:1]), has_weight_decay=False)]
            )
        experts = Parameter(Shard.replicated("experts", (4, H, H)))
        experts.update_block = UpdateBlock((1, H, H), work(H, H))
        units.append([*leaves, [experts]])
    return units


class Anywhere(MeshQueries):
    """Mesh of data ranks only."""

    def __init__(self, size: int) -> None:
        self.size = size

    def group(self, *axes: str):  # type: ignore[no-untyped-def]
        return planned_group(axes, 0, self.size if "data" in axes else 1, Ledger())

    def new_subgroup(self, axis: str, size: int):  # type: ignore[no-untyped-def]
        return planned_group((axis,), 0, size, Ledger())


def layouts(ranks: int, zero: int, count: int = 12) -> list[BucketLayout]:
    mesh = Anywhere(ranks)
    made: list[ZeroSharding] = []

    def cut(_: object) -> ZeroSharding:
        made.append(made[0] if made else ZeroSharding(zero, mesh.group("data"), mesh.new_subgroup("data", 1)))
        return made[0]

    return list(bucket_layouts(blocks(count), Replications(mesh, cut), 8 * H * H * 4))


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_no_matrix_is_split_and_each_rank_has_its_share(ranks: int, zero: int) -> None:
    loads = [0.0] * ranks
    for layout in layouts(ranks, zero):
        assert (layout.borders[0], layout.borders[-1], len(layout.borders)) == (0, layout.length, ranks + 1)
        assert list(layout.borders) == sorted(layout.borders)
        inner = set(layout.borders[1:-1])
        for segment in layout.segments:
            block, within = (
                segment.parameter.update_block,
                range(segment.start + 1, segment.start + segment.length),
            )
            if block is None:
                assert all(border % ALIGNMENT == 0 for border in inner if border in within)
                continue
            elements = block.elements(segment.parameter.shard)
            assert all((border - segment.start) % elements == 0 for border in inner if border in within)
            for rank, (first, last) in enumerate(pairwise(layout.borders)):
                overlap = max(0, min(last, within.stop) - max(first, segment.start))
                loads[rank] += overlap / elements * block.work
    largest = max(work(*shape) for shape in SHAPES.values())
    mean = sum(loads) / ranks
    assert max(loads) <= max(1.1 * mean, mean + largest)


def test_shares_are_equal_without_matrices() -> None:
    assert UpdateLoads(4).cut([], 1024) == (0, 256, 512, 768, 1024)


def test_ranks_with_little_work_get_more() -> None:
    loads = UpdateLoads(2)
    assert loads.cut([UpdateUnit(10, 3.0), UpdateUnit(20, 3.0), UpdateUnit(30, 6.0)], 32) == (0, 20, 32)
    assert loads.cut([UpdateUnit(5, 4.0)], 5) == (0, 5, 5)
    assert loads.cut([UpdateUnit(5, 1.0), UpdateUnit(10, 5.0)], 10) == (0, 5, 10)
    assert loads.works == [11.0, 11.0]
