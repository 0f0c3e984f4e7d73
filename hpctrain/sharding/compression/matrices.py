"""Which matrices a parameter's gradients are, and what factors of them weigh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter

from hpctrain.parallel.shard import Shard
from hpctrain.sharding.bucket_layout import BucketSegment
from hpctrain.sharding.replication import EXPERTS

FACTOR = "reducer/q"
"""The kind of the factors that go on from step to step."""


def factor_rank(n: int, m: int, rank: int) -> int:
    """Columns of the factors of an [n, m] matrix; 0 where they would be no smaller than it is."""
    columns = min(rank, n, m)
    return columns if columns * (n + m) < n * m else 0


def message_elements(shapes: Iterable[Sequence[int]], rank: int) -> tuple[int, int]:
    """Elements that a rank gives to the two all-reduces of tensors of these shapes.

    Vectors, and matrices (all dims but the first taken as one) of which factors would be no smaller, go
    whole with the first one.
    """
    first = second = 0
    for shape in shapes:
        n, m = shape[0], prod(shape[1:])
        columns = factor_rank(n, m, rank) if len(shape) > 1 else 0
        first += n * (columns or m)
        second += m * columns
    return first, second


@dataclass(frozen=True)
class Matrices:
    """The `count` matrices [n, m] of a parameter's local piece, and the columns of their factors: with `rank`
    0 it goes whole.

    `dim` is that of the rows: experts are stacked, each a matrix of its own, or several; all else is
    [first dim, all others].
    """

    segment: BucketSegment
    dim: int
    count: int
    n: int
    m: int
    rank: int

    @staticmethod
    def of(segment: BucketSegment, rank: int) -> Matrices:
        """Those of a parameter, with factors of at most `rank` columns."""
        shard = segment.parameter.shard
        dim = len(shard.local) - 2 if EXPERTS[0] in shard.split and len(shard.local) > 2 else 0
        count, n, m = prod(shard.local[:dim]), shard.local[dim], prod(shard.local[dim + 1 :])
        return Matrices(segment, dim, count, n, m, factor_rank(n, m, rank) if len(shard.local) > 1 else 0)

    @property
    def elements(self) -> slice:
        """Of the bucket."""
        return slice(self.segment.start, self.segment.start + self.segment.length)

    @property
    def alike(self) -> tuple[int, int, int, str]:
        """What those have in common that are multiplied at once.

        The last bits of a product may depend on what else is multiplied with it. Tied embeddings are to get
        the same ones on both ends of the pipeline, beside other parameters: they are by themselves.
        """
        alone = self.segment.parameter.shard.name if self.segment.replication.ends else ""
        return self.n, self.m, self.rank, alone

    @property
    def first_factor(self) -> Shard:
        """The place of Q' [count, rank, m] in that of the whole tensor, by which it is drawn at first."""
        shard, dim = self.segment.parameter.shard, self.dim

        def as_rows(sizes: tuple[int, ...], rows: int) -> tuple[int, ...]:
            return (*sizes[:dim], rows, *sizes[dim + 1 :])

        shape, local = as_rows(shard.shape, self.rank), as_rows(shard.local, self.rank)
        return Shard(f"{shard.name} {FACTOR}", shape, as_rows(shard.start, 0), local)

    @property
    def stored_factor(self) -> Shard:
        """The place of Q' in a checkpoint: those of the parameter's pieces, however they are cut, lie behind
        each other, as each is of a piece alone.
        """
        shard, dim, held = self.segment.parameter.shard, self.dim, self.segment.replication
        number, pieces = 0, 1
        if dim:
            cuts = zip(shard.shape[dim:], shard.start[dim:], shard.local[dim:], strict=True)
            places = [(start // local, -(-size // local)) for size, start, local in cuts]
            number, pieces = max(places, key=itemgetter(1))
        elif held.pieces is not None:
            number, pieces = held.pieces.rank // shard.copies, held.pieces.size // shard.copies
        return Shard(
            shard.name,
            (*shard.shape[:dim], pieces, self.rank, self.m),
            (*shard.start[:dim], number, 0, 0),
            (*shard.local[:dim], 1, self.rank, self.m),
        )
