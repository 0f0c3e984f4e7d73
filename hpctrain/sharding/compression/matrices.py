"""Matrices of a parameter's gradients, and the sizes of their low-rank factors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from operator import itemgetter

from hpctrain.parallel.shards import Shard, piece_and_position
from hpctrain.sharding.bucket_layout import BucketSegment
from hpctrain.sharding.replication import EXPERTS

FACTOR = "reducer/q"
"""Kind of the factors that continue from step to step."""


def factor_rank(n: int, m: int, rank: int) -> int:
    """Return the number of columns of the factors of an [n, m] matrix; 0 if factors would not be smaller."""
    columns = min(rank, n, m)
    return columns if columns * (n + m) < n * m else 0


@dataclass(frozen=True)
class Matrices:
    """The matrices [n, m] of a parameter's local tensor.

    Experts are stacked, and each of them is one matrix or several. Any other tensor is one matrix: [first
    dim, all others].

    Attributes:
        segment: Segment of the parameter.
        dim: Dim of the rows.
        count: Number of matrices.
        n: Number of rows.
        m: Number of columns.
        factor_columns: Number of columns of the factors; 0 if gradients are sent in full.
    """

    segment: BucketSegment
    dim: int
    count: int
    n: int
    m: int
    factor_columns: int

    @staticmethod
    def of(segment: BucketSegment, most_columns: int) -> Matrices:
        """Return the matrices of a parameter, with factors of at most `most_columns` columns."""
        shard = segment.parameter.shard
        dim = len(shard.local) - 2 if EXPERTS[0] in shard.split and len(shard.local) > 2 else 0
        count, n, m = prod(shard.local[:dim]), shard.local[dim], prod(shard.local[dim + 1 :])
        columns = factor_rank(n, m, most_columns) if len(shard.local) > 1 else 0
        return Matrices(segment, dim, count, n, m, columns)

    @property
    def elements(self) -> slice:
        """Part of the bucket that the matrices occupy."""
        return slice(self.segment.start, self.segment.start + self.segment.length)

    @property
    def batch_key(self) -> tuple[int, int, int, str]:
        """Key of the MatrixStack in which the matrices are multiplied, with others that have the same key.

        The last bits of a product may depend on the other matrices in its batch. Tied embeddings must get the
        same bits on both ends of the pipeline, next to other parameters, so each of them is a batch of its
        own.
        """
        tied_name = self.segment.parameter.shard.name if self.segment.replication.tied_pipeline else ""
        return self.n, self.m, self.factor_columns, tied_name

    @property
    def first_factor(self) -> Shard:
        """Shard of Q' [count, factor_columns, m], by whose name and places initial values are drawn."""
        shard, dim = self.segment.parameter.shard, self.dim

        def as_rows(sizes: tuple[int, ...], rows: int) -> tuple[int, ...]:
            return (*sizes[:dim], rows, *sizes[dim + 1 :])

        shape, local = as_rows(shard.shape, self.factor_columns), as_rows(shard.local, self.factor_columns)
        return Shard(f"{shard.name} {FACTOR}", shape, as_rows(shard.start, 0), local)

    @property
    def stored_factor(self) -> Shard:
        """Shard of Q' in a checkpoint, [..., pieces, factor_columns, m].

        Each tensor or expert rank's piece of a parameter has a factor of its own; dim `pieces` counts them.
        """
        shard, dim, replication = self.segment.parameter.shard, self.dim, self.segment.replication
        number, pieces = 0, 1
        if dim:
            cuts = zip(shard.shape[dim:], shard.start[dim:], shard.local[dim:], strict=True)
            places = [(start // local, -(-size // local)) for size, start, local in cuts]
            number, pieces = max(places, key=itemgetter(1))
        elif replication.pieces is not None:
            number, _ = piece_and_position(shard.holder_counts, replication.pieces.rank)
            pieces = len(shard.holder_counts) or replication.pieces.size
        return Shard(
            shard.name,
            (*shard.shape[:dim], pieces, self.factor_columns, self.m),
            (*shard.start[:dim], number, 0, 0),
            (*shard.local[:dim], 1, self.factor_columns, self.m),
        )
