"""Fingerprints of all tensors of a checkpoint, read once by all ranks in shares."""

from __future__ import annotations

import numpy as np
import torch

from hpctrain.checkpoint.agree import raise_on_all_ranks, reduce_integers
from hpctrain.checkpoint.checkpoint_index import CheckpointIndex
from hpctrain.checkpoint.tensor_source import open_tensors, typed_values
from hpctrain.comm.group import Group
from hpctrain.fault_checks.fingerprint import SUMS, Fingerprint

_PIECE = 1 << 16
"""Number of elements that are read at a time."""


def file_fingerprints(structure: CheckpointIndex, group: Group) -> dict[str, Fingerprint]:
    """Return the fingerprints of the datasets of a checkpoint by name, the same on all ranks. Collective.

    Checksums are not compared.

    Args:
        structure: Index of the checkpoint.
        group: Ranks that share the work.

    Raises:
        InputOutputError: The file cannot be read. All ranks raise it.
    """
    names = list(structure.datasets)
    pieces = [
        (index, first)
        for index, name in enumerate(names)
        for first in range(0, structure.datasets[name].elements, _PIECE)
    ]
    own = {name: Fingerprint() for name in names}
    with raise_on_all_ranks(group), open_tensors(structure.path) as file:
        buffer = np.empty(8 * _PIECE, np.uint8)
        for index, first in pieces[group.rank :: group.size]:
            stored = structure.datasets[names[index]]
            count = min(_PIECE, stored.elements - first)
            words = file.read_elements(stored, first, count, buffer)
            own[names[index]].add(
                typed_values(words, stored.kind), np.arange(first, first + count, dtype=np.uint64)
            )
    bits = reduce_integers(group, np.array([each.bits for each in own.values()], np.uint64)).view(np.uint64)
    rows = [[*each.sketch, each.broken, each.elements] for each in own.values()]
    sums = group.all_reduce(torch.tensor(rows, dtype=torch.float64).reshape(-1, SUMS + 2)).numpy()
    return {
        name: Fingerprint(int(word), row[:SUMS].copy(), float(row[SUMS]), float(row[SUMS + 1]))
        for name, word, row in zip(names, bits, sums, strict=True)
    }
