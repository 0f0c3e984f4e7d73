"""Attention with heads exchanged for pieces over the context axis (DeepSpeed-Ulysses, arXiv 2309.14509).

With 2 ranks and 4 heads, each rank has half of the sequence with all heads. An all-to-all gives rank 0 the
full sequence of heads 0 and 1, and rank 1 that of heads 2 and 3. After attention the outputs return the same
way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.parallel.backward.autograd import exchange
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs


def _heads_to_sequence(group: Group, x: Tensor) -> Tensor:
    """Return the full sequence of a share of the heads, [s, b, heads/c, d], of pieces [s/c, b, heads, d]."""
    parts = x.unflatten(2, (group.size, -1)).permute(2, 0, 1, 3, 4).contiguous()
    return group.all_to_all(parts).flatten(0, 1)


def _sequence_to_heads(group: Group, x: Tensor) -> Tensor:
    """Return pieces with all heads, [s/c, b, heads, d]: the inverse of `_heads_to_sequence`."""
    parts = x.contiguous().unflatten(0, (group.size, -1))
    return group.all_to_all(parts).permute(1, 2, 0, 3, 4).flatten(2, 3)


def all_to_all_attention(
    inputs: AttentionInputs, group: Group, attend: Callable[[AttentionInputs], Tensor]
) -> Tensor:
    """Return the attention [s/c, b, heads, d] over the full sequence. Collective over the context ranks.

    Keys and values with fewer heads than ranks are repeated until each rank has one.

    Args:
        inputs: Queries, keys and values of this rank's piece. The pieces of the ranks are consecutive.
        group: Ranks of the context axis.
        attend: Attention of full sequences on one rank.
    """
    query, key, value, sinks, _, documents = inputs.rotated()
    repeats = group.size // key.shape[2]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=2), value.repeat_interleave(repeats, dim=2)
    to_sequence, to_heads = partial(_heads_to_sequence, group), partial(_sequence_to_heads, group)
    query, key, value = (exchange(x, to_sequence, to_heads) for x in (query, key, value))
    if sinks is not None:
        sinks = sinks.chunk(group.size)[group.rank].clone()
    output = attend(AttentionInputs(query, key, value, sinks, documents=documents))
    return exchange(output, to_heads, to_sequence)
