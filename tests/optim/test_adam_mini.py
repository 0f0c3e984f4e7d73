"""Adam-mini against its authors' formulas in numpy, on layouts, in plans and checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.deck.read import parse_deck
from hpctrain.engine.build import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.optim.adam_mini import AdamMini
from hpctrain.optim.block_rule import BlockRules
from hpctrain.plan.memory import plan_memory
from hpctrain.train.verify import miniature, verify_layout
from tests.engines import DECK, small_deck
from tests.optim.block_rules import (
    DECAY,
    HEAD,
    LAYOUTS,
    frozen_stay,
    goes_on,
    replicas_meet,
    ten_updates,
    trains_as_one,
)

NAME = "optimizer.name=adam-mini"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ten_updates_are_those_of_the_authors(world: World, dtype: torch.dtype) -> None:
    """Algorithm 1 of arXiv 2406.16793: of a query's heads, of rows, of a norm as a whole."""
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

    rules = BlockRules(AdamMini((beta1, beta2), epsilon, DECAY))
    optimizer = ten_updates(world, dtype, rules, update)
    kept = {each.shard.name: each.values.numel() for each in optimizer.state() if "avg_sq" in each.kind}
    assert kept == {"query": 2, "matrix": 5, "norm": 1, "experts": 3 * 2 * 4}


@pytest.mark.mpi
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_train_as_one_rank_and_hold_what_is_planned(world: World, name: str) -> None:
    trains_as_one(world, name, NAME, "optimizer.epsilon=1e-3")


def test_state_is_a_number_for_each_head_or_row() -> None:
    """Of a Llama of 8 heads, 2 of keys: queries and keys by head, what else is a matrix by row, 5 norms."""
    deck = small_deck(
        NAME, "model.family=llama", "model.mlp=48", "model.tied=false", "model.key_value_heads=2"
    )
    block = 8 + 2 + 8 + 32 + 48 + 48 + 32
    elements = 2 * (2 * 32 * 32 + 2 * 8 * 32 + 3 * 48 * 32) + 2 * 61 * 32 + 5 * 32
    assert plan_memory(deck, 1, 61).largest.memory.optimizer == 4 * (elements + 2 * block + 2 * 61 + 5)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_run_goes_on_on_another_layout(world: World, mpi_tmp_path: Path) -> None:
    stored = goes_on(world, mpi_tmp_path, NAME, "optimizer.epsilon=1e-3")
    assert stored["optimizer/exp_avg_sq/blocks.0.attention.query.weight"].shape == (8, 1)
    assert stored["optimizer/exp_avg_sq/blocks.0.attention.value.weight"].shape == (8, 1)
    assert stored["optimizer/exp_avg_sq/embedding.tokens.weight"].shape == (61, 1)
    assert stored["optimizer/exp_avg_sq/blocks.0.attention_norm.weight"].shape == (1,)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_layout_is_verified(world: World) -> None:
    deck = small_deck(NAME, "layout.tensor=2", "layout.sequence_parallel=true")
    assert miniature(deck).optimizer.name == "adam-mini"
    assert verify_layout(deck, world, make_mesh(deck, world))


def test_what_is_frozen_stays(world: World) -> None:
    frozen_stay(world, NAME)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_replicas_have_state_of_their_own_and_meet(world: World) -> None:
    replicas_meet(world, NAME)


def test_what_it_does_not_go_with() -> None:
    for key, sentence in {
        "communication.server=sync": "optimizer.name=adam-mini: does not go with .*: servers cut matrices",
        "optimizer.momentum=0.9": "optimizer.momentum=0.9: has no effect on optimizer.name",
    }.items():
        with pytest.raises(HpctrainError, match=sentence) as error:
            parse_deck(DECK, [NAME, key])
        assert len(error.value.problems) == 1
    with pytest.raises(HpctrainError, match=r"memory.optimizer=disk: .*in blocks"):
        small_deck(NAME, "memory.optimizer=disk")
