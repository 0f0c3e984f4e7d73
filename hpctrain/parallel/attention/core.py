"""The interface of causal attention, and the choice of what computes it."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from torch import Tensor

from hpctrain.data.documents import Documents
from hpctrain.parallel.attention.all_to_all import all_to_all_attention
from hpctrain.parallel.attention.ring import ring_attention
from hpctrain.parallel.kernels.attention_tiles import AttentionRule
from hpctrain.parallel.layer_context import LayerContext


class AttentionCore(Protocol):
    """Causal softmax attention of this rank's pieces of the sequences. Collective over the context ranks."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *tables: Tensor,
        documents: Documents | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the output [s/c, b, heads, d].

        Args:
            query: Queries [s/c, b, heads, d].
            key: Keys, which may have fewer heads.
            value: Values, as many as keys.
            tables: Tables of a Rotary that rotates queries and keys first, or none.
            documents: Boundaries of documents, which attention does not cross. None for full sequences.
            sinks: Score [heads] of a further key of each head, whose value is zero. Requires
                `attention_core(..., sinks=True)`.
        """


def attention_core(layer_context: LayerContext, rule: AttentionRule, sinks: bool = False) -> AttentionCore:
    """Return the attention function of these ranks: of one rank, along a ring, or by all-to-all.

    Args:
        layer_context: Groups and functions of the layer.
        rule: Scale, window and soft cap.
        sinks: True if the function is called with sinks.
    """
    on_one_rank: AttentionCore = partial(layer_context.functions.attend, scale=rule.scale)
    if rule.needs_tiles or sinks:
        on_one_rank = partial(layer_context.functions.attend_by_rule, rule=rule)
    if layer_context.context.size == 1:
        return on_one_rank
    if layer_context.context_form == "ring":
        return partial(ring_attention, group=layer_context.context, rule=rule)
    return partial(all_to_all_attention, group=layer_context.context, attend=on_one_rank)
