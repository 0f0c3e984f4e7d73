"""Layout of messages with a server's elements of the parameters or of their gradients.

A server owns ranges of parameters. Messages contain them one after the other. Of an embedding table without a
tied head, only the rows that occur in a share of the samples are sent, with their numbers. Rows are always
complete in messages, although a range may start or end inside a row.
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
    """Range of a flat parameter that a server owns.

    Attributes:
        name: Name of the parameter.
        start: First element.
        stop: Element after the last one.
        row: Number of elements per row of an embedding table that is sent by rows; otherwise 0.
        trained: True if the parameter is trained.
    """

    name: str
    start: int
    stop: int
    row: int = 0
    trained: bool = True

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def rows(self, touched: Tensor) -> Tensor:
        """Return those of the `touched` rows, in ascending order, of which the range has elements."""
        first, last = self.start // self.row, -(-self.stop // self.row)
        return touched[(touched >= first) & (touched < last)]

    def _incomplete_rows(self, rows: Tensor) -> Iterator[tuple[int, slice, slice]]:
        """Yield the index, the elements in the range and the elements in the row of each incomplete row."""
        first, last = -(-self.start // self.row), self.stop // self.row
        for place in ((rows < first) | (rows >= last)).nonzero().flatten().tolist():
            begin = int(rows[place]) * self.row
            low, high = max(begin, self.start), min(begin + self.row, self.stop)
            yield place, slice(low - self.start, high - self.start), slice(low - begin, high - begin)

    def _complete_rows(self, values: Tensor) -> tuple[int, Tensor]:
        """Return the number of the first complete row, and the complete rows of `values`, [n, row]."""
        first, last = -(-self.start // self.row), self.stop // self.row
        last = max(first, last)
        begin = min(first * self.row, self.stop) - self.start
        return first, values[begin : begin + (last - first) * self.row].view(-1, self.row)

    def take(self, values: Tensor, rows: Tensor) -> Tensor:
        """Return rows of the range's `values`, [n, row]. Elements outside of the range are zero."""
        first, complete = self._complete_rows(values)
        inside = (rows >= first) & (rows < first + len(complete))
        result = values.new_zeros(len(rows), self.row)
        result[inside] = complete[rows[inside] - first]
        for place, here, there in self._incomplete_rows(rows):
            result[place, there] = values[here]
        return result

    def put(self, values: Tensor, rows: Tensor, row_values: Tensor) -> None:
        """Write rows [n, row] into the range's `values`."""
        first, complete = self._complete_rows(values)
        inside = (rows >= first) & (rows < first + len(complete))
        complete[rows[inside] - first] = row_values[inside]
        for place, here, there in self._incomplete_rows(rows):
            values[here] = row_values[place, there]


Rows = Sequence[Tensor]
"""Numbers of rows of each range of a table, in ascending order."""


class WireFormat:
    """Ranges of one server in the order in which messages contain them."""

    def __init__(self, pieces: Iterable[ServedRange]) -> None:
        self.pieces = tuple(pieces)
        self.tables = tuple(piece for piece in self.pieces if piece.row)
        self.elements = sum(piece.elements for piece in self.pieces)

    def rows(self, touched: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the touched rows of each range of a table, by the touched rows of each table."""
        return [piece.rows(touched[piece.name]) for piece in self.tables]

    def length(self, counts: Sequence[int] | None) -> int:
        """Return the length of a message with so many rows of each range of a table (None: all elements)."""
        if counts is None:
            return self.elements
        dense = sum(piece.elements for piece in self.pieces if not piece.row)
        return dense + sum(count * piece.row for count, piece in zip(counts, self.tables, strict=True))

    def pack(self, values: Sequence[Tensor], rows: Rows | None) -> Tensor:
        """Return a new flat tensor for a message, from the flat `values` of each range (`rows` None: all)."""
        of_tables = iter(rows or ())
        return torch.cat(
            [
                piece.take(each, next(of_tables)).flatten() if piece.row and rows is not None else each
                for piece, each in zip(self.pieces, values, strict=True)
            ]
            or [torch.empty(0)]
        )

    def unpack(self, flat: Tensor, values: Sequence[Tensor], rows: Rows | None) -> None:
        """Write a message into the `values` of each range; rows that it lacks stay unchanged."""
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


def embedding_row_sizes(models: Iterable[ModelPart]) -> dict[str, int]:
    """Return the row size of each embedding table without a tied head, by name."""
    layers = [each for model in models for layer in model.layers for each in layer.modules()]
    tied = {id(layer.table) for layer in layers if isinstance(layer, VocabularyHead)}
    tables = (layer.table for layer in layers if isinstance(layer, VocabularyEmbedding))
    return {table.shard.name: table.shape[1] for table in tables if id(table) not in tied}


def owned_ranges(buckets: Iterable[Bucket]) -> list[tuple[str, int, int]]:
    """Return name, start and stop of each range that this rank owns, in the order of the buckets."""
    return [
        (segment.parameter.shard.name, offset, offset + elements.numel())
        for bucket in buckets
        for segment, elements, offset in bucket.owned_segments(bucket.owned_gradients)
        if elements.numel()
    ]


def served_ranges(
    ranges: Iterable[tuple[str, int, int]], parameters: Mapping[str, Parameter], models: Iterable[ModelPart]
) -> list[ServedRange]:
    """Return the ranges of a server from the list that it has sent, on a rank that knows all parameters."""
    tables = embedding_row_sizes(models)
    return [
        ServedRange(name, start, stop, tables.get(name, 0), parameters[name].requires_grad)
        for name, start, stop in ranges
    ]
