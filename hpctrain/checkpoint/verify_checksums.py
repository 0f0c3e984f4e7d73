"""Compare what a checkpoint file holds with the checksums stored in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hpctrain.checkpoint import checksum
from hpctrain.checkpoint.agree import raise_on_all_ranks, shorten_problems
from hpctrain.checkpoint.checkpoint_index import CheckpointIndex, StoredTensor, examine
from hpctrain.checkpoint.tensor_source import open_tensors
from hpctrain.comm.group import Group
from hpctrain.errors import InputOutputError


def verify(path: str | Path, group: Group) -> CheckpointIndex:
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


def verify_pieces(structure: CheckpointIndex, group: Group, mine: Sequence[tuple[StoredTensor, int]]) -> None:
    """Read whole the pieces (dataset, number) given on this rank and compare them; collective.

    Raises InputOutputError on all ranks, naming the file, the datasets and the elements.
    """
    damaged: dict[str, list[int]] = {}
    with raise_on_all_ranks(group), open_tensors(structure.path) as source:
        buffer = np.empty(0, np.uint8)
        for stored, piece in mine:
            first = piece * checksum.PIECE
            count = min(checksum.PIECE, stored.elements - first)
            if buffer.size < count * stored.item_bytes:
                buffer = np.empty(count * stored.item_bytes, np.uint8)
            words = source.read_elements(stored, first, count, buffer)
            sums = checksum.seeds(stored.dataset, stored.kind, stored.shape)
            checksum.add(sums, words, (first,), (count,), (stored.elements,))
            if sums[piece] != structure.sums[stored.first_piece + piece]:
                damaged.setdefault(stored.dataset, []).append(piece)
        if damaged:
            datasets = structure.datasets
            raise InputOutputError(
                shorten_problems(
                    [damage_message(structure.path, datasets[name], at) for name, at in damaged.items()]
                )
            )


def damage_message(path: Path, stored: StoredTensor, pieces: Sequence[int]) -> str:
    """The sentence about a dataset whose pieces of these numbers differ from their checksums."""
    first = pieces[0] * checksum.PIECE
    last = min(first + checksum.PIECE, stored.elements) - 1
    more = f" (and {len(pieces) - 1} more pieces)" if len(pieces) > 1 else ""
    where = f"elements {first} to {last}{more}"
    return f"{path}: {stored.dataset} is damaged: {where} differ from their checksum"
