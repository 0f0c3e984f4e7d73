"""The interface of causal attention, and the choice of what computes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from torch import Tensor

from hpctrain.parallel.attention.all_to_all import all_to_all_attention
from hpctrain.parallel.attention.ring import ring_attention
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs
from hpctrain.parallel.kernels.attention_tiles import AttentionRule
from hpctrain.parallel.layer_context import LayerContext

AttentionCore: TypeAlias = Callable[[AttentionInputs], Tensor]
"""Causal softmax attention of this rank's pieces of the sequences. Collective over the context ranks.

It takes queries, keys and values of these pieces, and returns the output [s/c, b, heads, d].
"""


def attention_core(layer_context: LayerContext, rule: AttentionRule) -> AttentionCore:
    """Return the attention function of these ranks: of one rank, along a ring, or by all-to-all.

    Args:
        layer_context: Groups and functions of the layer.
        rule: Scale, window and soft cap.
    """
    on_one_rank, ranks = partial(layer_context.functions.attend, rule=rule), layer_context.context
    if ranks.size == 1:
        return on_one_rank
    if layer_context.context_form == "ring":
        return partial(ring_attention, group=ranks, rule=rule)
    return partial(all_to_all_attention, group=ranks, attend=on_one_rank)
