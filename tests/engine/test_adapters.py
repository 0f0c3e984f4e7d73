"""Adapters are trained alone, and alike on every layout.

Tests of parallel/adapter.py and deck/sections/adapters.py.
"""

from __future__ import annotations

import re

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.deck.read import parse_deck
from hpctrain.deck.toml_text import deck_text
from hpctrain.engine.build import build_engine
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.engine.name_patterns import check_patterns
from hpctrain.errors import HpctrainError
from hpctrain.model.construction import architecture_of
from hpctrain.model.part import logits_of
from hpctrain.parallel.adapter import is_adapter
from hpctrain.train.layout_verification import compare
from hpctrain.train.scaled_down_deck import scale_down_family
from tests.deck.small_text import SMALL, problems
from tests.engines import LLAMA, reference, small_deck, trainer

FAMILIES = {"gpt2": (), "llama": LLAMA}
ADAPTERS = ("model.adapters.rank=3", "model.adapters.alpha=5")
SPLIT = ("layout.tensor=2", "layout.sequence_parallel=true")
LAYOUTS = {
    "data": (),
    "zero 1": ("layout.zero=1",),
    "zero 2": ("layout.zero=2",),
    "zero 3": ("layout.zero=3",),
    "zero 3, sliced, computed again": (
        "layout.zero=3",
        "memory.accumulate=sliced",
        "memory.recompute=full",
        'model.adapters.targets=["feed_forward.*"]',
    ),
    "tensor": ("layout.tensor=2", 'model.adapters.targets=["query", "value", "down"]'),
    "sequence parallel": SPLIT,
    "selective": (*SPLIT, "memory.recompute=selective"),
    "context": ("layout.context=2",),
    "heads for sequence": ("layout.context=2", "layout.context_form=all_to_all", "layout.zero=3"),
    "pipeline": ("layout.pipeline=2", "model.dropout=0.1"),
    "weight gradients later": ("layout.pipeline=2", "layout.schedule=zb-h1"),
}
MIXTURE = (
    *LLAMA,
    "model.experts.count=4",
    "model.experts.mlp=24",
    "model.experts.shared=1",
    "layout.expert=2",
)


@pytest.mark.sampled(8)
@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_first_step_of_every_layout_is_that_of_one_rank(world: World, family: str, layout: str) -> None:
    compared(world, *FAMILIES[family], *ADAPTERS, *LAYOUTS[layout])


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("layout", ["data", "zero 3", "sequence parallel"])
def test_experts_have_none_and_all_else_has(world: World, layout: str) -> None:
    compared(world, *MIXTURE, *ADAPTERS, *LAYOUTS[layout])


def compared(world: World, *keys: str) -> None:
    deck = small_deck(*keys)
    differences = compare(scale_down_family(deck), world, make_mesh(deck, world))
    seen = {each.name.removeprefix("gradient of ") for each in differences if each.name[:8] == "gradient"}
    assert any(name.endswith("down.adapter.a") for name in seen), seen
    assert all(is_adapter(name.split()[0]) for name in seen if "." in name), seen
    for difference in differences:
        bound = 0.0 if re.fullmatch(r"parameter \S+", difference.name) else 1e-5
        assert difference.error <= bound, difference


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_all_but_adapters_stay_as_they_are(world: World, zero: int, compute: str) -> None:
    if world.size == 1 and zero:
        pytest.skip("cuts over two ranks or more")
    layout = f"layout.zero={zero}", f"precision.compute={compute}"
    deck = small_deck(*LLAMA, *ADAPTERS, *layout, "batch.global_size=8")
    run, single = trainer(world, deck), reference(world, deck)
    before = {name: values.clone() for name, values in run.parameters().items()}
    losses = [step.loss for step in run.train(5)]
    rounding = 1e-5 if compute == "fp32" else 2.0**-8
    assert losses == pytest.approx([step.loss for step in single.train(5)], rel=rounding)
    assert losses[-1] < losses[0]
    for name, values in run.parameters().items():
        assert torch.equal(values, before[name]) != is_adapter(name), name
    for bucket, state in zip(run.engine.stage.buckets, run.engine.stage.optimizer.states, strict=True):
        adapting = {is_adapter(segment.parameter.shard.name) for segment in bucket.segments}
        assert adapting == {bucket.trained} and len(state) == (3 if bucket.trained else 1)
        assert (bucket.owned_gradients.numel() > 0) == bucket.trained


def test_new_adapters_change_no_bit(world: World) -> None:
    lone, tokens = world.single_rank_world(), torch.arange(32).view(1, -1)
    decks = small_deck(*LLAMA), small_deck(*LLAMA, *ADAPTERS)
    bare, adapted = (build_engine(deck, lone, make_mesh(deck, lone)) for deck in decks)
    assert torch.equal(logits_of(bare.model, tokens), logits_of(adapted.model, tokens))


def test_a_deck_has_them_in_a_table() -> None:
    assert parse_deck(SMALL).model.adapters is None
    deck = parse_deck(f"{SMALL}\n[model.adapters]\nrank = 4\n", ['model.adapters.targets=["query"]'])
    found = deck.model.adapters
    assert found is not None and (found.rank, found.scale, found.targets) == (4, 4.0, ("query",))
    assert found.adapts("blocks.0.attention.query") and not found.adapts("blocks.0.attention.key")
    assert parse_deck(deck_text(deck)).model == deck.model


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("[model.adapters]\nrank = 0", "model.adapters.rank = 0: must be a whole number from 1 to 65536"),
        (
            "[model.adapters]\nranks = 1",
            "model.adapters.ranks = 1: unknown key (did you mean model.adapters.rank?)",
        ),
        ("[model.adapters]\ntargets = []", "model.adapters.targets = []: must be a list of texts"),
        ('[model.adapters]\n[optimizer]\nname = "muon"', "it cannot update them"),
        ('[model.adapters]\n[precision]\ncompute = "fp8"', "matrices with adapters need 16 bits"),
        ('[model.adapters]\n[communication]\nserver = "async"', "leave [communication.server] out"),
        (
            '[model.adapters]\n[memory]\noptimizer = "disk"',
            'the state of adapters is small (use "device")',
        ),
    ],
)
def test_what_will_not_do(keys: str, told: str) -> None:
    sentences = problems(f"{SMALL}\n{keys}\n")
    assert any(told in sentence for sentence in sentences), sentences


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("rank=33", "exceeds the size of blocks.0.attention.query, 32 x 32"),
        (
            'targets=["query", "gate"]',
            'targets: no matrix of a block matches "gate" (expected query, key, value, output, up or down)',
        ),
    ],
)
def test_what_does_not_suit_the_model(key: str, told: str) -> None:
    deck = small_deck(f"model.adapters.{key}")
    with pytest.raises(HpctrainError) as caught:
        check_patterns(deck, architecture_of(deck, 61))
    assert told in caught.value.problems[0]
