"""Attention with heads exchanged for pieces over the context axis (DeepSpeed-Ulysses, arXiv 2309.14509).

With 2 ranks and 4 heads, each rank has half of the sequence with all heads. An all-to-all gives rank 0 the
full sequence of heads 0 and 1, and rank 1 that of heads 2 and 3. After attention the outputs return the same
way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.data.documents import Documents
from hpctrain.parallel.kernels.layer_functions import rotate


def _heads_to_sequence(x: Tensor, group: Group) -> Tensor:
    """Return the full sequence of a share of the heads, [s, b, heads/c, d], of pieces [s/c, b, heads, d]."""
    parts = x.unflatten(2, (group.size, -1)).permute(2, 0, 1, 3, 4).contiguous()
    return group.all_to_all(parts).flatten(0, 1)


def _sequence_to_heads(x: Tensor, group: Group) -> Tensor:
    """Return pieces with all heads, [s/c, b, heads, d]: the inverse of `_heads_to_sequence`."""
    parts = x.contiguous().unflatten(0, (group.size, -1))
    return group.all_to_all(parts).permute(1, 2, 0, 3, 4).flatten(2, 3)


class _Exchange(torch.autograd.Function):
    """Exchange of heads for pieces of the sequence (`to_sequence`), or the inverse.

    The backward pass is the exchange in the other direction. x is [s/c, b, heads, d] or [s, b, heads/c, d].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, to_sequence: bool) -> Tensor:
        ctx.group, ctx.to_sequence = group, to_sequence
        return (_heads_to_sequence if to_sequence else _sequence_to_heads)(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        exchange = _sequence_to_heads if ctx.to_sequence else _heads_to_sequence
        return exchange(gradient, ctx.group), None, None


def all_to_all_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *tables: Tensor,
    group: Group,
    attend: Callable[..., Tensor],
    documents: Documents | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention [s/c, b, heads, d] over the full sequence. Collective over the context ranks.

    Keys and values with fewer heads than ranks are repeated until each rank has one.

    Args:
        query: Queries of this rank's piece, [s/c, b, heads, d]. The pieces of the ranks are consecutive.
        key: Keys of the piece.
        value: Values of the piece.
        tables: Tables of a Rotary that rotates queries and keys first, or none.
        group: Ranks of the context axis.
        attend: AttentionCore of one rank, which computes full sequences.
        documents: Boundaries of documents, which attention does not cross. None for full sequences.
        sinks: Score of a further key of each head of the piece, whose value is zero; None without one.
    """
    if tables:
        query, key = rotate(query, *tables), rotate(key, *tables)
    shared = group.size // key.shape[2]
    if shared > 1:
        key, value = key.repeat_interleave(shared, dim=2), value.repeat_interleave(shared, dim=2)
    query, key, value = (_Exchange.apply(x, group, True) for x in (query, key, value))
    if sinks is not None:
        attend = partial(attend, sinks=sinks.chunk(group.size)[group.rank].clone())
    result: Tensor = _Exchange.apply(attend(query, key, value, documents=documents), group, False)
    return result
