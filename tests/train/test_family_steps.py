"""Five steps of each family on data, tensor, context and pipeline ranks: those of one rank.

Decks name folders of `transformers`, whose models have rough weights and uncommon sizes.
Tests of deck/families/deepseek.py beside checkpoint/exchange/source.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoint.exchange.hugging_face.architectures import ARCHITECTURES
from hpctrain.comm.world import World
from hpctrain.deck.families import FAMILIES
from hpctrain.deck.one_rank import on_one_rank
from tests.causal_models import deck_of, on_rank_0, trainer_of
from tests.checkpoint.exchange.test_families import CASES, reference

pytest.importorskip("transformers")

STEPS = 5
# A large epsilon makes updates nearly proportional to gradients, by which rounding stays what it is.
KEYS = (
    *("batch.sequence=24", "optimizer.adamw.epsilon=1.0", "optimizer.clip=0"),
    *("learning_rate.peak=0.1", "learning_rate.warmup=0"),
)
ON_TWO: dict[str, tuple[str, ...]] = {
    "data": ("layout.zero=1", "memory.recompute=selective"),
    "zero-3": ("layout.zero=3",),
    "tensor": ("layout.tensor=2", "layout.sequence_parallel=true"),
    "ring": ("layout.context=2",),
    "all-to-all": ("layout.context=2", "layout.context_form=all_to_all"),
    "zb-v": ("layout.pipeline=2", "layout.schedule=zb-v"),
    "interleaved": ("layout.pipeline=2", "layout.schedule=interleaved", "layout.chunks=2"),
    "recompute": ("layout.zero=2", "memory.recompute=full"),
    "experts": ("layout.expert=2",),
    "uneven-heads": ("layout.tensor=2", "layout.sequence_parallel=true"),
}
ON_FOUR: dict[str, tuple[str, ...]] = {
    "tensor-context": ("layout.tensor=2", "layout.context=2", "layout.sequence_parallel=true"),
    "tensor-zb-h1": ("layout.tensor=2", "layout.pipeline=2", "layout.schedule=zb-h1"),
    "tensor-zero-3": ("layout.tensor=2", "layout.zero=3", "memory.recompute=full"),
    "context-data": ("layout.context=2", "layout.zero=1", "layout.context_form=all_to_all"),
}


def expert_count(name: str) -> int:
    """Return the number of experts of the model of a case; 0 if it has none."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((CASES[name][1][key] for key in keys if key in CASES[name][1]), 0)


def cases(layouts: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    """Return each model on each layout."""
    every = [(name, layout) for name in CASES for layout in layouts]
    # The scaled positions of phi3-partial require its size of a head.
    excluded = {(name, "experts") for name in CASES if not expert_count(name)} | {
        ("phi3-partial", "uneven-heads")
    }
    return [case for case in every if case not in excluded]


def layout_of(name: str, layout: str) -> tuple[str, ...]:
    """Return the keys of a layout. Experts that ranks do not divide are split themselves."""
    divided = layout != "experts" or expert_count(name) % 2 == 0
    return (ON_TWO | ON_FOUR)[layout] if divided else ("layout.expert_tensor=2",)


def uneven_heads(name: str) -> dict[str, int]:
    """Return changes of a model to heads that two ranks do not divide evenly."""
    config: Any = reference(name).config
    heads = config.num_attention_heads
    key_values = getattr(config, "num_key_value_heads", None) or heads
    group = heads // key_values if config.hidden_size % 9 == 0 else 1
    if key_values == 1:
        return {"num_attention_heads": 9 if group > 1 else 3}
    changes = {"num_attention_heads": 3 * group}
    return changes | ({"num_key_value_heads": 3} if hasattr(config, "num_key_value_heads") else {})


def steps(world: World, folder: Path, *keys: str, alone: bool = False) -> list[list[float]]:
    """Return losses and norms of gradients of the first steps."""
    deck = deck_of(folder, *KEYS, *keys)
    training = trainer_of(world, on_one_rank(deck) if alone else deck)
    found = [[result.loss, result.grad_norm] for result in training.train(STEPS)]
    training.engine.close()
    return found


_of_one_rank: dict[tuple[str, bool], list[list[float]]] = {}


def compare(world: World, folder: Path, name: str, layout: str) -> None:
    """Compare a layout with one rank. Collective."""

    def alone() -> list[list[float]]:
        changes = uneven_heads(name) if layout == "uneven-heads" else {}
        reference(name, **changes).save_pretrained(folder)  # type: ignore[operator]
        key = name, bool(changes)
        if key not in _of_one_rank:
            _of_one_rank[key] = steps(world.single_rank_world(), folder, alone=True)
        return _of_one_rank[key]

    expected = on_rank_0(world, alone)
    for measured, theirs in zip(steps(world, folder, *layout_of(name, layout)), expected, strict=True):
        assert measured == pytest.approx(theirs, rel=1e-5)
    assert expected[-1][0] != expected[0][0]


def test_each_architecture_is_compared() -> None:
    kinds = {kind.removesuffix("Text") for kind, _ in CASES.values()}
    named = {each.name for each in ARCHITECTURES.values() if each.head == "vocabulary"}
    assert {name.removesuffix("LMHeadModel").removesuffix("ForCausalLM") for name in named} <= kinds
    assert set(FAMILIES) <= {each.family for each in ARCHITECTURES.values()}


@pytest.mark.sampled(6)
@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(("name", "layout"), cases(ON_TWO))
def test_steps_on_two_ranks(world: World, mpi_tmp_path: Path, name: str, layout: str) -> None:
    compare(world, mpi_tmp_path / "theirs", name, layout)


@pytest.mark.sampled(3)
@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize(("name", "layout"), cases(ON_FOUR))
def test_steps_on_four_ranks(world: World, mpi_tmp_path: Path, name: str, layout: str) -> None:
    compare(world, mpi_tmp_path / "theirs", name, layout)
