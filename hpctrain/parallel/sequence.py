"""Pieces of a sequence that context ranks have (context parallelism).

With 2 context ranks and a sequence of 8 tokens, the ranks have these positions:

| `context_form` | rank 0 | rank 1 | attention |
|---|---|---|---|
| `ring` | 0 1 6 7 | 2 3 4 5 | keys and values travel around the ring (`attention/ring.py`) |
| `all_to_all` | 0 1 2 3 | 4 5 6 7 | heads are exchanged for pieces (`attention/all_to_all.py`) |

In a ring every rank has an early and a late piece, which balances the work of causal attention. Sequence
parallelism, which splits the sequence between the linear layers over tensor ranks, is in `tensor.py`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hpctrain.comm.group import Group

ContextForm = Literal["ring", "all_to_all"]


def context_positions(group: Group, form: ContextForm, sequence: int) -> Tensor:
    """Return the global positions of this rank's piece, int64 [s/c], in increasing order.

    For a ring, the sequence is cut into 2 c pieces, and rank r has piece r and piece 2 c - 1 - r, so that
    causal attention is the same work on all ranks. For "all_to_all", rank r has piece r of c.

    Args:
        group: Ranks of the context axis.
        form: How attention exchanges pieces.
        sequence: Tokens of a sequence, s, a multiple of twice the number of ranks.
    """
    rank, size = group.rank, group.size
    if size == 1:
        return torch.arange(sequence)
    if form == "all_to_all":
        return torch.arange(sequence).chunk(size)[rank].clone()
    pieces = torch.arange(sequence).chunk(2 * size)
    return torch.cat((pieces[rank], pieces[2 * size - 1 - rank]))
