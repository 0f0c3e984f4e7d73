"""Arrays in a file that is open, read where they lie, and compared with their checksums piece by piece."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.errors import InputOutputError

CHECKSUM = np.dtype("<u4")
TEXT = np.dtype("u1")
BLOCK = 1 << 20


def require_range(start: int, count: int, size: int) -> None:
    """Raise an IndexError unless `count` elements from `start` on lie within an array of `size` elements."""
    if not 0 <= start <= start + count <= size:
        raise IndexError(f"elements [{start}, {start + count}) are out of range [0, {size})")


@dataclass(frozen=True)
class StoredArray:
    """A contiguous dataset in a file that is open; `where` begins what is said of it."""

    where: str
    file: int
    offset: int
    dtype: np.dtype[Any]
    size: int

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """Elements [count]; InputOutputError where they cannot be read."""
        require_range(start, count, self.size)
        values = np.empty(count, self.dtype)
        rest = memoryview(values.view(TEXT).data)
        offset = self.offset + start * self.dtype.itemsize
        while rest:
            try:
                done = os.preadv(self.file, [rest], offset)
            except OSError as error:
                raise InputOutputError(f"{self.where}: cannot be read ({error.strerror})") from None
            if not done:
                raise InputOutputError(f"{self.where}: has become shorter since it was opened")
            rest, offset = rest[done:], offset + done
        return values

    def blocks(self) -> Iterator[npt.NDArray[Any]]:
        """Read all elements in order, at most BLOCK of them at a time."""
        for start in range(0, self.size, BLOCK):
            yield self.read(start, min(BLOCK, self.size - start))

    def checksum(self) -> int:
        """Return the CRC-32 of all elements."""
        crc = 0
        for values in self.blocks():
            crc = zlib.crc32(values.data, crc)
        return crc


class PiecedArray:
    """An array with a checksum for every `piece` elements, which is compared when one of them is first read.

    `noun` is what its elements are called. `bound`, where it is given, is what they all have to be below.
    """

    def __init__(
        self, array: StoredArray, checksums: StoredArray, piece: int, noun: str, bound: int | None = None
    ) -> None:
        self.array, self.checksums, self.piece, self.noun, self.bound = array, checksums, piece, noun, bound
        self._verified = bytearray(-(-checksums.size // 8))

    def forget(self) -> None:
        """The file was written to: nothing of it is known to be right."""
        self._verified = bytearray(len(self._verified))

    def read(self, start: int, count: int, out: npt.NDArray[Any]) -> None:
        """Fill `out` [count] with elements from `start` on. InputOutputError where a piece is damaged."""
        size, end = self.piece, start + count
        for piece in range(start // size, -(-end // size)):
            first, last = max(start, piece * size), min(end, (piece + 1) * size)
            out[first - start : last - start] = self._read_of_piece(piece, first, last)

    def problems(self, rank: int, ranks: int) -> Iterator[str]:
        """What is damaged in this rank's share of the pieces."""
        pieces = self.checksums.size
        for piece in range(pieces * rank // ranks, pieces * (rank + 1) // ranks):
            try:
                self._read_piece(piece)
            except InputOutputError as error:
                yield from error.problems

    def _read_of_piece(self, piece: int, first: int, last: int) -> npt.NDArray[Any]:
        """Elements first .. last - 1 of a piece, which is verified unless it was before."""
        byte, bit = piece // 8, 1 << piece % 8
        if self._verified[byte] & bit:
            return self.array.read(first, last - first)
        begin = piece * self.piece
        whole = self._read_piece(piece)
        self._verified[byte] |= bit
        return whole[first - begin : last - begin]

    def _read_piece(self, piece: int) -> npt.NDArray[Any]:
        """Read all elements of a piece; InputOutputError where one of them cannot have been written."""
        start = piece * self.piece
        values = self.array.read(start, min(self.piece, self.array.size - start))
        if zlib.crc32(values.data) != self.checksums.read(piece, 1)[0]:
            last = start + len(values) - 1
            where = f"piece {piece + 1} of {self.checksums.size}, {self.noun} {start} to {last}"
            again = "copy or prepare the file again"
            raise InputOutputError(f"{self.array.where}: {where}, is damaged (wrong checksum); {again}")
        if self.bound is not None and values.max(initial=0) >= self.bound:
            place = int((values >= self.bound).argmax())
            raise InputOutputError(
                f"{self.array.where}: token {start + place} is {values[place]}, "
                f"out of range [0, {self.bound}) of its vocabulary; prepare the text again"
            )
        return values
