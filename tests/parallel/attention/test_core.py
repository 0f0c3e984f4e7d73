"""Work of attention with a window on one rank, along a ring and by all-to-all.

Tests of parallel/attention/core.py, parallel/attention/ring.py and parallel/attention/all_to_all.py. Groups
are planned ones, whose messages are left out, since only the sizes of products count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.comm.ledger import Ledger
from hpctrain.comm.planned import planned_group
from hpctrain.parallel.attention.core import attention_core
from hpctrain.parallel.kernels import attention_tiles
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs
from hpctrain.parallel.kernels.attention_tiles import AttentionRule
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.sequence import ContextForm

SEQUENCE, WINDOW, HEADS = 256, 64, 4


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize(
    ("form", "ranks"), [("ring", 1), ("ring", 2), ("ring", 4), ("all_to_all", 2), ("all_to_all", 4)]
)
def test_a_window_of_a_quarter_halves_the_scores(
    monkeypatch: pytest.MonkeyPatch, form: ContextForm, ranks: int, cap: float
) -> None:
    """On each rank forward and backward compute at most half of the scores of full attention."""
    full = HEADS * SEQUENCE * (SEQUENCE + 1) // 2
    windowed = HEADS * (WINDOW * SEQUENCE - WINDOW * (WINDOW - 1) // 2)
    work = [
        counted_scores(monkeypatch, form, rank, ranks, AttentionRule(1.0, WINDOW, cap))
        for rank in range(ranks)
    ]
    for of_ranks in zip(*work, strict=True):
        assert sum(of_ranks) == windowed
        assert max(of_ranks) <= full / ranks / 2


def counted_scores(
    monkeypatch: pytest.MonkeyPatch, form: ContextForm, rank: int, ranks: int, rule: AttentionRule
) -> tuple[int, int]:
    """Return the number of unmasked scores of one rank, in the forward and in the backward pass."""
    counts = {"attend_block": 0, "attend_block_backward": 0}

    def counting(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def attend(self: AttentionRule, block: attention_tiles.AttentionBlock, *operands: Any) -> Any:
            query = operands[0]
            rows, columns = (each.stop - each.start for each in (block.queries, block.keys))
            pairs = rows * columns if block.mask == "none" else rows * (rows + 1) // 2
            counts[name] += pairs * query.shape[2]
            return compute(self, block, *operands)

        return attend

    with monkeypatch.context() as patch:
        for name in counts:
            patch.setattr(AttentionRule, name, counting(name, getattr(AttentionRule, name)))
        cpu = torch.device("cpu")
        alone, context = (
            planned_group((axis,), at, of, Ledger(), device=cpu)
            for axis, at, of in (("tensor", 0, 1), ("context", rank, ranks))
        )
        attend = attention_core(LayerContext(alone, context, context_form=form), rule)

        def piece() -> Tensor:
            return torch.randn(SEQUENCE // ranks, 1, HEADS, 8, requires_grad=True)

        attend(AttentionInputs(piece(), piece(), piece())).sum().backward()
    return counts["attend_block"], counts["attend_block_backward"]
