"""Faults of context parallel attention."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

import hpctrain.model.transformer as transformer
import hpctrain.parallel.attention.ring as ring
import hpctrain.pipeline.execute as execute
from hpctrain.parallel.kernels.attention_tiles import PartialAttention
from tests.train.layout_faults.deck_keys import CONTEXT, GPT2, ULYSSES
from tests.train.layout_faults.fault import LayoutFault
from tests.train.layout_faults.planting import (
    changed_positions,
    changed_results,
    scale,
    skipped_calls,
    swap_halves,
    wrapped,
)
from tests.train.layout_faults.scene import in_second_step, in_third_micro_batch, on_rank_1
from tests.train.layout_faults.shared_changes import use_local_positions

fault = partial(LayoutFault, "context")


def faults() -> list[LayoutFault]:
    """Return the faults of this seam."""
    return [
        fault("positions that wrap at 128", CONTEXT, changed_positions(lambda each: each % 128)),
        fault(
            "positions of the own piece",
            ULYSSES,
            changed_positions(lambda each: each - each.min(), in_second_step),
        ),
        fault("positions in 16 bits", CONTEXT, changed_positions(lambda each: each.half(), in_second_step)),
        fault(
            "keys of the third micro-batch",
            CONTEXT,
            changed_results("context", "recv", scale(1.1), in_third_micro_batch),
        ),
        fault(
            "gradients of keys that stay away",
            CONTEXT,
            lambda s: s.communicated(
                "context", "recv", lambda v: v.zero_() if v.dim() == 5 else None, in_second_step
            ),
        ),
        fault("keys that come later", CONTEXT, wrapped(ring, "_visible", _show_all_keys)),
        fault("parts that are not merged", CONTEXT, skipped_calls(PartialAttention, "add")),
        fault("heads in another order", ULYSSES, changed_results("context", "all_to_all", swap_halves)),
        fault(
            "heads of the third micro-batch",
            ULYSSES,
            changed_results("context", "all_to_all", scale(1.1), in_third_micro_batch),
        ),
        fault(
            "documents that begin elsewhere",
            (*CONTEXT, "data.document_mask=true"),
            wrapped(ring, "_rows_before", _shift_document_start),
        ),
        fault(
            "windows of other positions",
            (*CONTEXT, "model.windows=[3, 0]"),
            wrapped(ring, "_piece_starts", _shift_late_piece),
        ),
        fault(
            "tokens in another order", CONTEXT, wrapped(execute, "context_piece", _reverse_tokens, on_rank_1)
        ),
        fault(
            "learned positions of the own piece",
            (*CONTEXT, *GPT2),
            wrapped(transformer.PositionEmbedding, "forward", use_local_positions),
        ),
    ]


def _shift_late_piece(original: Any, *arguments: Any) -> tuple[int, int]:
    early, late = original(*arguments)
    return early, late + 1


def _reverse_tokens(original: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    return original(tokens, positions).flip(0)


def _show_all_keys(original: Any, source: int, rank: int, half: int) -> Any:
    queries, keys, causal = original(source, rank, half)
    return queries, slice(0, 2 * half) if source < rank else keys, causal


def _shift_document_start(original: Any, place: int, *rest: int) -> int:
    return max(0, original(place, *rest) - 1)
