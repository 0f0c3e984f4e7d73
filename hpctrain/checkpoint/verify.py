"""Compare what a checkpoint file holds with the checksums stored in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hpctrain.checkpoint import checksum
from hpctrain.checkpoint.agree import shortened, together
from hpctrain.checkpoint.extract import opened
from hpctrain.checkpoint.structure import Stored, Structure, examine
from hpctrain.comm.group import Group
from hpctrain.errors import InputOutputError


def verify(path: str | Path, group: Group) -> Structure:
    """Read every tensor, spread over the ranks, and compare it with its checksums; collective.

    Returns the file's structure. Raises on all ranks InputOutputError if anything differs, naming it,
    HpctrainError if the file is no checkpoint.
    """
    structure = examine(Path(path), group)
    every = [
        (stored, piece)
        for stored in structure.datasets.values()
        for piece in range(checksum.pieces(stored.elements))
    ]
    first, last = (len(every) * rank // group.size for rank in (group.rank, group.rank + 1))
    verify_pieces(structure, group, every[first:last])
    return structure


def verify_pieces(structure: Structure, group: Group, mine: Sequence[tuple[Stored, int]]) -> None:
    """Read whole the pieces (dataset, number) given on this rank and compare them; collective.

    Raises InputOutputError on all ranks, naming the file, the datasets and the elements.
    """
    damaged: dict[str, list[int]] = {}
    with together(group), opened(structure.path) as source:
        buffer = np.empty(0, np.uint8)
        for stored, piece in mine:
            size = stored.item_bytes
            first = piece * checksum.PIECE
            count = min(checksum.PIECE, stored.elements - first)
            if buffer.nbytes < count * size:
                buffer = np.empty(count * size, np.uint8)
            words = buffer[: count * size].view(f"u{size}")
            source.read(words, stored.offset + first * size)
            sums = checksum.seeds(stored.dataset, stored.kind, stored.shape)
            checksum.add(sums, words, (first,), (count,), (stored.elements,))
            if sums[piece] != structure.sums[stored.first_piece + piece]:
                damaged.setdefault(stored.dataset, []).append(first)
        if damaged:
            raise InputOutputError(shortened([_told(structure, *item) for item in damaged.items()]))


def _told(structure: Structure, dataset: str, firsts: list[int]) -> str:
    elements = structure.datasets[dataset].elements
    last = min(firsts[0] + checksum.PIECE, elements) - 1
    more = f" (and {len(firsts) - 1} more such pieces)" if len(firsts) > 1 else ""
    where = f"elements {firsts[0]} to {last}{more}"
    return f"{structure.path}: {dataset} is damaged: {where} differ from their checksum"
