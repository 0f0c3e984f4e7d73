"""Arrays in an open file that are read directly and compared with the checksums of their pieces."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.errors import InputOutputError

CHECKSUM_DTYPE = np.dtype("<u4")
BYTE_DTYPE = np.dtype("u1")
BLOCK = 1 << 20


def require_range(start: int, count: int, size: int) -> None:
    """Raise an IndexError unless `count` elements from `start` on are within an array of `size` elements."""
    if not 0 <= start <= start + count <= size:
        raise IndexError(f"elements [{start}, {start + count}) are out of range [0, {size})")


@dataclass(frozen=True)
class StoredArray:
    """Contiguous dataset of an open file.

    Attributes:
        where: Beginning of error messages.
        file: Descriptor of the file.
        offset: Place of the first element in the file, in bytes.
        dtype: Type of the elements.
        size: Number of elements.
    """

    where: str
    file: int
    offset: int
    dtype: np.dtype[Any]
    size: int

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """Return the elements `start` to `start + count - 1`, [count].

        Raises:
            InputOutputError: They cannot be read.
        """
        require_range(start, count, self.size)
        values = np.empty(count, self.dtype)
        rest = memoryview(values.view(BYTE_DTYPE).data)
        offset = self.offset + start * self.dtype.itemsize
        while rest:
            try:
                done = os.preadv(self.file, [rest], offset)
            except OSError as error:
                raise InputOutputError(f"{self.where}: cannot be read ({error.strerror})") from None
            if not done:
                raise InputOutputError(f"{self.where}: was truncated after it was opened")
            rest, offset = rest[done:], offset + done
        return values

    def blocks(self) -> Iterator[npt.NDArray[Any]]:
        """Yield all elements in order, at most BLOCK of them at a time."""
        for start in range(0, self.size, BLOCK):
            yield self.read(start, min(BLOCK, self.size - start))

    def checksum(self) -> int:
        """Return the CRC-32 of all elements."""
        crc = 0
        for values in self.blocks():
            crc = zlib.crc32(values.data, crc)
        return crc


class PiecedArray:
    """Array with a checksum for every `piece` elements, which is compared when one of them is first read."""

    def __init__(
        self, array: StoredArray, checksums: StoredArray, piece: int, noun: str, bound: int | None = None
    ) -> None:
        """Read an array.

        Args:
            array: The elements.
            checksums: CRC-32 of each piece.
            piece: Number of elements of a piece.
            noun: Name of its elements, plural, for messages.
            bound: Number that is larger than all elements, or None.
        """
        self.array, self.checksums, self.piece, self.noun, self.bound = array, checksums, piece, noun, bound
        self._verified = bytearray(-(-checksums.size // 8))

    def forget(self) -> None:
        """Mark all pieces as not verified, after the file has changed."""
        self._verified = bytearray(len(self._verified))

    def read(self, start: int, count: int, out: npt.NDArray[Any]) -> None:
        """Fill `out` [count] with the elements from `start` on.

        Raises:
            InputOutputError: A piece is damaged or cannot be read.
        """
        size, end = self.piece, start + count
        for piece in range(start // size, -(-end // size)):
            first, last = max(start, piece * size), min(end, (piece + 1) * size)
            out[first - start : last - start] = self._read_of_piece(piece, first, last)

    def problems(self, rank: int, ranks: int) -> Iterator[str]:
        """Yield the errors in this rank's share of the pieces."""
        pieces = self.checksums.size
        for piece in range(pieces * rank // ranks, pieces * (rank + 1) // ranks):
            try:
                self._read_piece(piece)
            except InputOutputError as error:
                yield from error.problems

    def _read_of_piece(self, piece: int, first: int, last: int) -> npt.NDArray[Any]:
        """Return the elements `first` to `last - 1` of a piece, which is verified unless it was before."""
        byte, bit = piece // 8, 1 << piece % 8
        if self._verified[byte] & bit:
            return self.array.read(first, last - first)
        begin = piece * self.piece
        values = self._read_piece(piece)
        self._verified[byte] |= bit
        return values[first - begin : last - begin]

    def _read_piece(self, piece: int) -> npt.NDArray[Any]:
        """Return all elements of a piece.

        Raises:
            InputOutputError: The checksum is wrong, or an element is out of bounds.
        """
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
