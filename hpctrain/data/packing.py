"""Packing of conversations into sequences: as many as fit, in the order of the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from hpctrain.data.token_files import Tokens

Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Packing:
    """Documents of a file in the rows (sequences) of its packing.

    A document of n tokens needs n - 1 places of a row, since its last token predicts nothing. If it needs
    more than a row has, its end is cut off. It is left out if no learned token remains.

    Attributes:
        begins: First token of each document that is not left out, by its position in the file.
        places: Number of places that each of these documents has.
        firsts: Number of the first document of each row, and at the end the number of documents.
        cut: Number of documents that are cut.
        lost: Number of tokens that are cut off.
        left_out: Number of documents that are left out.
    """

    begins: Array
    places: Array
    firsts: Array
    cut: int
    lost: int
    left_out: int

    @staticmethod
    def of(file: Tokens, length: int, pack: bool = True) -> Packing:
        """Pack the documents of a file into sequences of `length` tokens, or without `pack` one into each.

        Only documents that are cut are searched for learned tokens, since `hpctrain prepare` writes no
        document without any.
        """
        ends = file.document_ends()
        begins = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
        needed = ends - begins - 1
        learned = needed > 0
        for number in np.flatnonzero(needed > length).tolist():
            learned[number] = bool(file.learned(int(begins[number]) + 1, length).any())
        left_out = int(((needed > 0) & ~learned).sum())
        begins, needed = begins[learned], needed[learned]
        places = np.minimum(needed, length)
        lost = needed - places
        firsts = [*range(len(places) + 1)] if not pack else _firsts(places, length)
        return Packing(begins, places, np.array(firsts), int((lost > 0).sum()), int(lost.sum()), left_out)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.firsts) - 1

    def documents(self, row: int) -> range:
        """Return the documents of a row, as indices of `begins` and `places`."""
        return range(int(self.firsts[row]), int(self.firsts[row + 1]))


def _firsts(places: Array, length: int) -> list[int]:
    """Return the first document of each row, and at the end the number of documents."""
    ends, firsts = places.cumsum(), [0]
    while firsts[-1] < len(places):
        before = int(ends[firsts[-1]] - places[firsts[-1]])
        firsts.append(int(np.searchsorted(ends, before + length, side="right")))
    return firsts
