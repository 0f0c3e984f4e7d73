"""Which conversations of a file share a sequence: in the order of the file, as many as it has places for."""

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
    """Documents that have anything to predict, by number, each with its first and last token, and how many
    places it takes; row r has those from `firsts[r]` on to `firsts[r + 1]`, exclusive.

    A document of n tokens takes n - 1 places, since its last token predicts nothing. One that would take more
    than `length` is cut at its end: `cut` of them lose so many `lost` tokens. A document of which no learned
    token remains then is left out: there are `left_out` of these.
    """

    begins: Array
    places: Array
    firsts: Array
    cut: int
    lost: int
    left_out: int

    @staticmethod
    def of(file: Tokens, length: int, pack: bool = True) -> Packing:
        """Pack the documents of a file into sequences of `length`; without `pack` one into each.

        Whether tokens are learned is read only of documents that are cut: `hpctrain prepare` writes no other
        document in which nothing is learned.
        """
        ends = file.document_ends()
        begins = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
        whole = ends - begins - 1
        learned = whole > 0
        for number in np.flatnonzero(whole > length).tolist():
            learned[number] = bool(file.learned(int(begins[number]) + 1, length).any())
        left_out = int(((whole > 0) & ~learned).sum())
        begins, whole = begins[learned], whole[learned]
        places = np.minimum(whole, length)
        lost = whole - places
        firsts = [*range(len(places) + 1)] if not pack else _firsts(places, length)
        return Packing(begins, places, np.array(firsts), int((lost > 0).sum()), int(lost.sum()), left_out)

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.firsts) - 1

    def documents(self, row: int) -> range:
        """Those of a row, as numbers in `begins` and `places`."""
        return range(int(self.firsts[row]), int(self.firsts[row + 1]))


def _firsts(places: Array, length: int) -> list[int]:
    """Where rows begin, and the last one ends."""
    ends, firsts = places.cumsum(), [0]
    while firsts[-1] < len(places):
        before = int(ends[firsts[-1]] - places[firsts[-1]])
        firsts.append(int(np.searchsorted(ends, before + length, side="right")))
    return firsts
