"""Which layers a deck leaves out of 8 bits, and what it cannot leave out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.model.eight_bits import excluded_problems, find_excluded
from hpctrain.parallel.eight_bits import EightBits
from hpctrain.parallel.fp8.product import DelayedProduct, QuantizedProduct
from hpctrain.parallel.linear import SplitLinear
from hpctrain.parallel.vocabulary import VocabularyHead
from hpctrain.plan.named import named_problems
from tests.engines import LLAMA, small_deck, trainer

FP8 = (*LLAMA, "precision.compute=fp8")
TENSOR = EightBits("tensor", "e5m2", 1)


@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.parametrize("tied", ["true", "false"])
def test_all_linear_layers_but_what_is_left_out_multiply_in_8_bits(world: World, tied: str) -> None:
    deck = small_deck(*FP8, f"model.tied={tied}", 'precision.fp8_exclude=["blocks.0.*", "head"]')
    (model,) = trainer(world, deck).engine.models
    modules = [module for layer in model.layers for module in layer.modules()]
    linear = [module for module in modules if isinstance(module, SplitLinear)]
    within = {layer.weights[0].shard.name for layer in linear if isinstance(layer.product, DelayedProduct)}
    assert within == {
        f"blocks.1.{name}.weight"
        for name in ("attention.query", "attention.output", "feed_forward.gate", "feed_forward.down")
    }
    assert len(linear) == 8
    heads = [module for module in modules if isinstance(module, VocabularyHead)]
    assert len(heads) == 1 and not isinstance(heads[0].product, QuantizedProduct)


@pytest.mark.parametrize(
    ("exclude", "reasons"),
    [
        (("head", "embedding.*", "*.down", "blocks.1.attention.output.weight"), []),
        (("*.attention_norm.*",), ['no linear layer is called "*.attention_norm.*"']),
        (
            ("*.query.weight",),
            [
                f"leaves out blocks.{block}.attention.query.weight, but not "
                f"blocks.{block}.attention.key.weight, with which it is one"
                for block in (0, 1)
            ],
        ),
        (("*",), ['leaves nothing to multiply in 8 bits (precision.compute = "bf16" would do the same)']),
    ],
)
def test_what_patterns_cannot_leave_out_is_told(
    world: World, exclude: tuple[str, ...], reasons: list[str]
) -> None:
    (model,) = trainer(world.alone(), small_deck(*LLAMA)).engine.models
    assert excluded_problems(exclude, [find_excluded([model], replace(TENSOR, exclude=exclude))]) == reasons


@pytest.mark.mpi(min_size=2, max_size=2)
def test_all_ranks_refuse_a_pattern_of_which_no_stage_has_a_layer(world: World) -> None:
    layout = ("layout.pipeline=2", "layout.schedule=1f1b")
    good = small_deck(*FP8, *layout, 'precision.fp8_exclude=["blocks.0.*"]')
    trainer(world, good)
    bad = small_deck(*FP8, *layout, 'precision.fp8_exclude=["blocks.0.*", "blocks.2.*"]')
    with pytest.raises(HpctrainError, match=r'fp8_exclude=.*: no linear layer is called "blocks.2.\*"'):
        trainer(world, bad)


def test_a_plan_says_so_beforehand() -> None:
    deck = small_deck(*FP8, 'precision.fp8_exclude=["blocks.7.*"]')
    (problem,) = named_problems(deck)
    assert (problem.key, problem.sentence) == (
        "precision.fp8_exclude",
        'no linear layer is called "blocks.7.*"',
    )
