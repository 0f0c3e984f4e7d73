"""Where documents begin in sequences that several are packed in, so that attention may stay within each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class DocumentSpan(NamedTuple):
    """Places `begin` to `end` (exclusive) of a row: a document, or what of it lies in the row's window."""

    row: int
    begin: int
    end: int


@dataclass(frozen=True)
class Documents:
    """Those of a micro-batch's rows, which every rank knows whole: attention on a piece of a sequence asks
    for all of it. They stay on the host, so that nothing waits for a device to learn where they begin.

    `places`, int64 [b, s]: of every token its place in its document.
    """

    places: Tensor

    @staticmethod
    def of(tokens: Tensor, end_of_document: int, samples: int | None = None) -> Documents:
        """Of tokens [b, s], of which one ends each document and belongs to it. Rows behind the `samples`
        (None: all are) are a document each.
        """
        begins = torch.zeros_like(tokens, dtype=torch.bool)
        begins[:samples, 1:] = tokens[:samples, :-1] == end_of_document
        index = torch.arange(tokens.shape[1])
        return Documents(index - (index * begins).cummax(1).values)

    @cached_property
    def pieces(self) -> list[DocumentSpan]:
        """All of them, row by row."""
        length = self.places.shape[1]
        found = [DocumentSpan(row, begin, length) for row, begin in (self.places == 0).nonzero().tolist()]
        ends = [behind.begin if behind.row == piece.row else length for piece, behind in pairwise(found)]
        return [piece._replace(end=end) for piece, end in zip(found, [*ends, length], strict=True)]

    def at(self, positions: Tensor) -> Tensor:
        """The places [n, b] of the tokens at `positions` [n] of all rows, on the device of these."""
        return self.places.to(positions.device, non_blocking=True).t()[positions]
