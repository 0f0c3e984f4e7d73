"""Compare Adam-mini with its authors' formulas in NumPy, and with its plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.deck.read import parse_deck
from hpctrain.errors import HpctrainError
from hpctrain.optim.matrix.adam_mini import AdamMini
from hpctrain.optim.matrix.matrix_rule import MatrixRules
from hpctrain.plan.memory_plan import plan_memory
from tests.engines import DECK, small_deck, trainer
from tests.optim.block_rules import DECAY, HEAD, ten_updates

NAME = "optimizer.name=adam-mini"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ten_updates_are_those_of_the_authors(world: World, dtype: torch.dtype) -> None:
    """Compare with algorithm 1 of arXiv 2406.16793 for heads of queries, rows, and a whole norm."""
    beta1, beta2, epsilon = 0.9, 0.95, 1e-8
    means: dict[str, np.ndarray] = {}
    squares: dict[str, np.ndarray] = {}

    def update(name: str, weights: np.ndarray, gradient: np.ndarray, t: int, rate: float) -> np.ndarray:
        if gradient.ndim == 1:
            cells = gradient.reshape(1, -1)
        elif name == "query":
            cells = gradient.reshape(gradient.shape[0] // HEAD, -1)
        else:
            cells = gradient.reshape(-1, gradient.shape[-1])
        means[name] = beta1 * means.get(name, 0.0) + (1 - beta1) * gradient
        squares[name] = beta2 * squares.get(name, 0.0) + (1 - beta2) * (cells**2).mean(1, keepdims=True)
        size = np.sqrt(squares[name] / (1 - beta2**t)) + epsilon
        step = (means[name] / (1 - beta1**t)).reshape(cells.shape) / size
        return weights * (1 - DECAY * rate * (gradient.ndim > 1)) - rate * step.reshape(gradient.shape)

    rules = MatrixRules(AdamMini((beta1, beta2), epsilon, DECAY))
    optimizer = ten_updates(world, dtype, rules, update)
    kept = {each.shard.name: each.values.numel() for each in optimizer.state() if "avg_sq" in each.kind}
    assert kept == {"query": 2, "matrix": 5, "norm": 1, "experts": 3 * 2 * 4}


def test_state_is_a_number_for_each_head_or_row(world: World) -> None:
    """Test a Llama with 8 heads, 2 of keys: one number per head, per row of other matrices, and per norm."""
    deck = small_deck(
        NAME, "model.family=llama", "model.mlp=48", "model.tied=false", "model.key_value_heads=2"
    )
    block = 8 + 2 + 8 + 32 + 48 + 48 + 32
    elements = 2 * (2 * 32 * 32 + 2 * 8 * 32 + 3 * 48 * 32) + 2 * 61 * 32 + 5 * 32
    assert plan_memory(deck, 1, 61).largest.memory.optimizer == 4 * (elements + 2 * block + 2 * 61 + 5)
    state = trainer(world.single_rank_world(), deck).engine.stage.optimizer.state()
    cells = {each.shard.name: each.shard.shape for each in state if each.kind == "optimizer/exp_avg_sq"}
    for name, shape in {
        "blocks.0.attention.query.weight": (8, 1),
        "blocks.0.attention.value.weight": (8, 1),
        "embedding.tokens.weight": (61, 1),
        "blocks.0.attention_norm.weight": (1,),
    }.items():
        assert cells[name] == shape, name


def test_conflicting_keys_are_refused() -> None:
    for key, sentence in {
        "communication.server.mode=sync": "optimizer.name=adam-mini: conflicts with .*servers split",
        "optimizer.momentum=0.9": "optimizer.momentum=0.9: has no effect with optimizer.name",
    }.items():
        with pytest.raises(HpctrainError, match=sentence) as error:
            parse_deck(DECK, [NAME, key])
        assert len(error.value.problems) == 1
