"""Boundaries of documents in packed sequences, so that attention can stay within a document."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class DocumentSpan(NamedTuple):
    """Positions `begin` to `end` (exclusive) of a row that belong to one document."""

    row: int
    begin: int
    end: int


@dataclass(frozen=True)
class Documents:
    """Documents in the rows of a micro-batch.

    Every rank has those of the complete rows, since attention on a piece of a sequence needs them. They are
    on the host, so reading them does not wait for a device.

    Attributes:
        places: Position of every token in its document, int64 [b, s].
    """

    places: Tensor

    @staticmethod
    def of(tokens: Tensor, end_of_document: int, samples: int | None = None) -> Documents:
        """Return the documents in `tokens`.

        Args:
            tokens: Token ids, [b, s].
            end_of_document: Token that ends each document and belongs to it.
            samples: Number of rows that are samples. Each later row is one document. None if all are samples.
        """
        begins = torch.zeros_like(tokens, dtype=torch.bool)
        begins[:samples, 1:] = tokens[:samples, :-1] == end_of_document
        index = torch.arange(tokens.shape[1])
        return Documents(index - (index * begins).cummax(1).values)

    @cached_property
    def pieces(self) -> list[DocumentSpan]:
        """Positions of all documents, row by row."""
        length = self.places.shape[1]
        spans = [DocumentSpan(row, begin, length) for row, begin in (self.places == 0).nonzero().tolist()]
        ends = [
            following.begin if following.row == each.row else length for each, following in pairwise(spans)
        ]
        return [each._replace(end=end) for each, end in zip(spans, [*ends, length], strict=True)]

    def at(self, positions: Tensor) -> Tensor:
        """Return the places of the tokens at `positions` [n] of all rows, [n, b], on the device of these."""
        return self.places.to(positions.device, non_blocking=True).t()[positions]
