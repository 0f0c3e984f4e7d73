"""Comparison of the tensors of a checkpoint with its checksums."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hpctrain.checkpoint import checksum
from hpctrain.checkpoint.agree import raise_on_all_ranks, shorten_problems
from hpctrain.checkpoint.checkpoint_index import CheckpointIndex, StoredTensor, examine
from hpctrain.checkpoint.checksum import Sums
from hpctrain.checkpoint.tensor_source import open_tensors
from hpctrain.comm.group import Group
from hpctrain.errors import InputOutputError


def verify(path: str | Path, group: Group) -> CheckpointIndex:
    """Read all tensors of a checkpoint, compare them with their checksums, and return its index. Collective.

    Each rank reads a share.

    Raises:
        HpctrainError: The file is not a checkpoint.
        InputOutputError: A tensor differs, or as in `examine`. All ranks raise the same error.
    """
    structure = examine(Path(path), group)
    all_pieces = [
        (stored, piece)
        for stored in structure.datasets.values()
        for piece in range(checksum.pieces(stored.elements))
    ]
    first, last = (len(all_pieces) * rank // group.size for rank in (group.rank, group.rank + 1))
    verify_pieces(structure, group, all_pieces[first:last])
    return structure


def verify_pieces(
    structure: CheckpointIndex, group: Group, pieces: Sequence[tuple[StoredTensor, int]]
) -> None:
    """Read pieces of datasets and compare them with their checksums. Collective.

    Args:
        structure: Index of the checkpoint.
        group: The ranks.
        pieces: Pieces that this rank reads, each as its dataset and its number there.

    Raises:
        InputOutputError: A piece of any rank differs. The message names file, datasets and elements.
    """
    damaged: dict[str, list[int]] = {}
    with raise_on_all_ranks(group), open_tensors(structure.path) as source:
        buffer = np.empty(0, np.uint8)
        for stored, piece in pieces:
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
            of_datasets = [(structure.datasets[name], numbers) for name, numbers in damaged.items()]
            problems = [damage_message(structure.path, *each) for each in of_datasets]
            raise InputOutputError(shorten_problems(problems))


def require_checksums(path: Path, stored: StoredTensor, sums: Sums, expected: Sums) -> None:
    """Raise InputOutputError if the checksums of a dataset of a file are not the expected ones."""
    if len(damaged := np.flatnonzero(sums != expected)):
        raise InputOutputError(damage_message(path, stored, damaged.tolist()))


def damage_message(path: Path, stored: StoredTensor, pieces: Sequence[int]) -> str:
    """Return the message about a dataset whose pieces with these numbers differ from their checksums."""
    first = pieces[0] * checksum.PIECE
    last = min(first + checksum.PIECE, stored.elements) - 1
    more = f" (and {len(pieces) - 1} more pieces)" if len(pieces) > 1 else ""
    where = f"elements {first} to {last}{more}"
    return f"{path}: {stored.dataset} is damaged: {where} differ from their checksum"
