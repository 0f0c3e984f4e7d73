"""How a server's elements of the parameters, or of their gradients, travel between it and the workers.

A server tells once which elements of which parameters are its own, its pieces. They travel behind each other
in that order. Of a table that is looked up alone, only the rows that a share of the samples touches travel,
with their numbers: whole ones, though a server's piece may begin or end within.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.model.part import ModelPart
from hpctrain.parallel.shards import Parameter
from hpctrain.parallel.vocabulary import VocabularyEmbedding, VocabularyHead
from hpctrain.sharding.bucket import Bucket

ROW_NUMBERS = torch.int32
"""Format of the numbers of rows."""


@dataclass(frozen=True)
class ServedRange:
    """Elements `start` to `stop` of a parameter, of a table that is looked up alone with `row` in each."""

    name: str
    start: int
    stop: int
    row: int = 0
    trained: bool = True

    @property
    def elements(self) -> int:
        """How many."""
        return self.stop - self.start

    def rows(self, touched: Tensor) -> Tensor:
        """Those of the `touched` rows, in rising order, of which it has elements."""
        first, last = self.start // self.row, -(-self.stop // self.row)
        return touched[(touched >= first) & (touched < last)]

    def _cut(self, rows: Tensor) -> Iterator[tuple[int, slice, slice]]:
        """Of each of `rows` that it has not whole: its place there, the elements in the piece, in the row."""
        first, last = -(-self.start // self.row), self.stop // self.row
        for place in ((rows < first) | (rows >= last)).nonzero().flatten().tolist():
            begin = int(rows[place]) * self.row
            low, high = max(begin, self.start), min(begin + self.row, self.stop)
            yield place, slice(low - self.start, high - self.start), slice(low - begin, high - begin)

    def _whole(self, values: Tensor) -> tuple[int, Tensor]:
        """The rows of `values` that it has whole [n, row], and the number of the first."""
        first, last = -(-self.start // self.row), self.stop // self.row
        last = max(first, last)
        begin = min(first * self.row, self.stop) - self.start
        return first, values[begin : begin + (last - first) * self.row].view(-1, self.row)

    def take(self, values: Tensor, rows: Tensor) -> Tensor:
        """Of the piece's `values` these rows [n, row]; what is not its own there is zero."""
        first, whole = self._whole(values)
        inside = (rows >= first) & (rows < first + len(whole))
        taken = values.new_zeros(len(rows), self.row)
        taken[inside] = whole[rows[inside] - first]
        for place, here, there in self._cut(rows):
            taken[place, there] = values[here]
        return taken

    def put(self, values: Tensor, rows: Tensor, given: Tensor) -> None:
        """Write `given` [n, row], as of `take`, into the piece's `values`."""
        first, whole = self._whole(values)
        inside = (rows >= first) & (rows < first + len(whole))
        whole[rows[inside] - first] = given[inside]
        for place, here, there in self._cut(rows):
            values[here] = given[place, there]


Rows = Sequence[Tensor]
"""The numbers of rows of each of some tables' pieces, in rising order."""


class WireFormat:
    """The pieces of one server, in the order in which they travel."""

    def __init__(self, pieces: Iterable[ServedRange]) -> None:
        self.pieces = tuple(pieces)
        self.tables = tuple(piece for piece in self.pieces if piece.row)
        self.elements = sum(piece.elements for piece in self.pieces)

    def rows(self, touched: Mapping[str, Tensor]) -> list[Tensor]:
        """Of each table's piece the touched rows."""
        return [piece.rows(touched[piece.name]) for piece in self.tables]

    def length(self, counts: Sequence[int] | None) -> int:
        """Elements that travel with so many rows of each table's piece; without `counts` all."""
        if counts is None:
            return self.elements
        dense = sum(piece.elements for piece in self.pieces if not piece.row)
        return dense + sum(count * piece.row for count, piece in zip(counts, self.tables, strict=True))

    def pack(self, values: Sequence[Tensor], rows: Rows | None) -> Tensor:
        """What travels, flat and in memory of its own, of each piece's flat `values`; with no `rows`, all."""
        of_tables = iter(rows or ())
        return torch.cat(
            [
                piece.take(each, next(of_tables)).flatten() if piece.row and rows is not None else each
                for piece, each in zip(self.pieces, values, strict=True)
            ]
            or [torch.empty(0)]
        )

    def unpack(self, flat: Tensor, values: Sequence[Tensor], rows: Rows | None) -> None:
        """Write what has travelled into each piece's `values`; other rows stay as they are."""
        of_tables, begin = iter(rows or ()), 0
        for piece, each in zip(self.pieces, values, strict=True):
            if piece.row and rows is not None:
                numbers = next(of_tables)
                end = begin + len(numbers) * piece.row
                piece.put(each, numbers, flat[begin:end].view(-1, piece.row))
            else:
                end = begin + piece.elements
                each.copy_(flat[begin:end])
            begin = end


def looked_up(models: Iterable[ModelPart]) -> dict[str, int]:
    """The names of tables of which rows are looked up and nothing else, each with a row's elements."""
    layers = [each for model in models for layer in model.layers for each in layer.modules()]
    tied = {id(layer.table) for layer in layers if isinstance(layer, VocabularyHead)}
    tables = (layer.table for layer in layers if isinstance(layer, VocabularyEmbedding))
    return {table.shard.name: table.shape[1] for table in tables if id(table) not in tied}


def own_pieces(buckets: Iterable[Bucket]) -> list[tuple[str, int, int]]:
    """Of each parameter, in the buckets' order, the elements that are this rank's own, if any."""
    return [
        (segment.parameter.shard.name, offset, offset + elements.numel())
        for bucket in buckets
        for segment, elements, offset in bucket.owned_segments(bucket.owned_gradients)
        if elements.numel()
    ]


def pieces_of(
    told: Iterable[tuple[str, int, int]], parameters: Mapping[str, Parameter], models: Iterable[ModelPart]
) -> list[ServedRange]:
    """The pieces that a server has told of, as any rank that has all parameters understands them."""
    tables = looked_up(models)
    return [
        ServedRange(name, start, stop, tables.get(name, 0), parameters[name].requires_grad)
        for name, start, stop in told
    ]
