"""Ring attention (arXiv 2310.01889) over the context axis, its causal work balanced.

The sequence is cut into 2c pieces; rank r holds piece r (early) and piece 2c - 1 - r (late). Keys and
values travel around the ring; while a rank computes with one rank's, the next ones are on their way.
Every rank then has the same work in every round: its whole queries over the early half of an earlier
rank's keys, or its late queries over all keys of a later rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.work import Work
from hpctrain.parallel.attention_block import attend, attend_backward, merge

_KEYS, _GRADIENTS = 1, 2
"""Message tags: keys and values, and their gradients."""


class _Ring:
    """Passes tensors to the next rank and takes the previous rank's."""

    def __init__(self, group: Group, tag: int) -> None:
        self.group, self.tag = group, tag
        self.works: list[Work[Any]] = []

    def start(self, outgoing: Tensor, incoming: Tensor) -> None:
        group = self.group
        self.works = [
            group.start_recv(incoming, (group.rank - 1) % group.size, self.tag),
            group.start_send(outgoing, (group.rank + 1) % group.size, self.tag),
        ]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


def _visible(source: int, rank: int, half: int) -> tuple[slice, slice, bool]:
    """Rows of the queries, rows of `source`'s keys, and whether a causal mask applies between them."""
    if source == rank:
        return slice(None), slice(None), True
    if source < rank:
        return slice(None), slice(0, half), False
    return slice(half, None), slice(None), False


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Group, scale: float | None
    ) -> Tensor:
        ctx.group, ctx.scale, half = group, scale, query.shape[0] // 2
        held = torch.stack((key, value))
        arriving = torch.empty_like(held)
        ring = _Ring(group, _KEYS)
        output, log_sum = torch.empty(0), torch.empty(0)
        for turn in range(group.size):
            if turn < group.size - 1:
                ring.start(held, arriving)
            source = (group.rank - turn) % group.size
            queries, keys, causal = _visible(source, group.rank, half)
            part, part_log_sum = attend(query[queries], held[0][keys], held[1][keys], causal, scale)
            if turn == 0:
                output, log_sum = part.to(torch.float32, copy=True), part_log_sum.contiguous()
            else:
                merge(output[queries], log_sum[..., queries], part, part_log_sum)
            if turn < group.size - 1:
                ring.wait()
                held, arriving = arriving, held
        result = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, log_sum)
        return result

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        group: Group = ctx.group
        query, key, value, output, log_sum = ctx.saved_tensors
        half = query.shape[0] // 2
        held = torch.stack((key, value))
        arriving = torch.empty_like(held)
        keys_ring, gradients_ring = _Ring(group, _KEYS), _Ring(group, _GRADIENTS)
        of_query = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        own = torch.zeros(held.shape, dtype=torch.float32, device=query.device)
        # The sum for a rank's keys starts at its successor and comes home in the last round.
        carried = torch.zeros_like(own)
        incoming = torch.empty_like(own)
        for turn in range(group.size):
            if turn < group.size - 1:
                keys_ring.start(held, arriving)
            source = (group.rank - turn) % group.size
            queries, keys, causal = _visible(source, group.rank, half)
            of_part = attend_backward(
                output_gradient[queries],
                query[queries],
                held[0][keys],
                held[1][keys],
                output[queries],
                log_sum[..., queries],
                causal,
                ctx.scale,
            )
            of_query[queries] += of_part[0]
            if turn > 1:
                gradients_ring.wait()
                carried, incoming = incoming, carried
            target = own if turn == 0 else carried
            target[0][keys] += of_part[1]
            target[1][keys] += of_part[2]
            if turn > 0:
                gradients_ring.start(carried, incoming)
            if turn < group.size - 1:
                keys_ring.wait()
                held, arriving = arriving, held
        gradients_ring.wait()
        own += incoming
        of_key, of_value = own.to(key.dtype)
        return of_query.to(query.dtype), of_key, of_value, None, None


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, group: Group, scale: float | None = None
) -> Tensor:
    """Causal attention of [s/c, b, heads, d] pieces (early and late, see above) over the whole sequence.

    `scale` as in `attend`.
    """
    result: Tensor = _RingAttention.apply(query, key, value, group, scale)
    return result
