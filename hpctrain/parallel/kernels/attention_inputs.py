"""Inputs of causal attention, and the rotation of queries and keys by their positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.data.documents import Documents


class AttentionInputs(NamedTuple):
    """Inputs of causal softmax attention of complete sequences, or of this rank's pieces of them.

    Attributes:
        query: Queries [s, b, heads, d].
        key: Keys, which may have fewer heads.
        value: Values, as many as keys.
        sinks: Score [heads] of a further key of each head, whose value is zero; None without one.
        tables: Cosine and sine of a Rotary, by which queries and keys are rotated first, or none.
        documents: Boundaries of documents, which attention does not cross. None for full sequences.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None = None
    tables: tuple[Tensor, ...] = ()
    documents: Documents | None = None

    def rotated(self) -> AttentionInputs:
        """Return these inputs with rotated queries and keys, and without tables."""
        if not self.tables:
            return self
        query, key = rotate(self.query, *self.tables), rotate(self.key, *self.tables)
        return AttentionInputs(query, key, self.value, self.sinks, (), self.documents)


def separate_sequences(
    documents: Documents | None, batch: int, positions: int
) -> Iterator[tuple[slice, int, int]]:
    """Yield rows of the batch, and the first and the end position, that attend only to themselves.

    Args:
        documents: Boundaries of documents, each of which is such a part. None if there is one part.
        batch: Number of sequences.
        positions: Number of positions of a sequence.
    """
    if documents is None:
        yield slice(0, batch), 0, positions
        return
    for row, begin, end in documents.pieces:
        yield slice(row, row + 1), begin, end


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return x [s, b, heads, d] rotated by the tables of a Rotary."""
    left, right = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-right, left), dim=-1) * sine
