"""Attention with heads exchanged for sequence over the context axis (DeepSpeed-Ulysses, arXiv 2309.14509)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.group import Group

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _heads_to_sequence(x: Tensor, group: Group) -> Tensor:
    """[s/c, b, heads, d] with all heads -> [s, b, heads/c, d] with the whole sequence."""
    parts = x.unflatten(2, (group.size, -1)).permute(2, 0, 1, 3, 4).contiguous()
    return group.all_to_all(parts).flatten(0, 1)


def _sequence_to_heads(x: Tensor, group: Group) -> Tensor:
    """The inverse: [s, b, heads/c, d] -> [s/c, b, heads, d]."""
    parts = x.contiguous().unflatten(0, (group.size, -1))
    return group.all_to_all(parts).permute(1, 2, 0, 3, 4).flatten(2, 3)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, to_sequence: bool) -> Tensor:
        ctx.group, ctx.to_sequence = group, to_sequence
        return (_heads_to_sequence if to_sequence else _sequence_to_heads)(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        exchange = _sequence_to_heads if ctx.to_sequence else _heads_to_sequence
        return exchange(gradient, ctx.group), None, None


def all_to_all_attention(query: Tensor, key: Tensor, value: Tensor, group: Group, attend: Attend) -> Tensor:
    """`attend` over the whole sequence for this rank's share of the heads.

    Tensors are [s/c, b, heads, d] with consecutive pieces of the sequence. Keys and values with fewer
    heads than the group has ranks are repeated until each rank gets one.
    """
    shared = group.size // key.shape[2]
    if shared > 1:
        key, value = key.repeat_interleave(shared, dim=2), value.repeat_interleave(shared, dim=2)
    query, key, value = (_Exchange.apply(x, group, True) for x in (query, key, value))
    result: Tensor = _Exchange.apply(attend(query, key, value), group, False)
    return result
