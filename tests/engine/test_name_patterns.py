"""What patterns of a deck name: layers that are left out of 8 bits, and what cannot be named so."""

from __future__ import annotations

import pytest

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.deck.problem import DeckProblem
from hpctrain.engine.name_patterns import pattern_problems
from hpctrain.errors import HpctrainError
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.fp8.delayed_matmul import DelayedMatmul
from hpctrain.parallel.fp8.quantized_matmul import QuantizedMatmul
from hpctrain.parallel.tensor import SplitLinear
from hpctrain.parallel.vocabulary import VocabularyHead
from hpctrain.plan.deck_references import reference_problems
from hpctrain.train.layout_verification import verify_layout
from hpctrain.train.scaled_down_deck import scale_down_family
from tests.engines import LLAMA, small_deck, trainer

FP8 = (*LLAMA, "precision.compute=fp8")
ALL = (*FP8, "optimizer.name=muon")
EXAMPLE = " (an example of a name is embedding.tokens.weight)"
MATRIX = " (an example of a matrix is blocks.1.attention.query.weight)"
LAYER = " (an example of a name is blocks.0.attention.query.weight)"


@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.parametrize("tied", ["true", "false"])
def test_all_linear_layers_but_what_is_left_out_multiply_in_8_bits(world: World, tied: str) -> None:
    deck = small_deck(*FP8, f"model.tied={tied}", 'precision.fp8_exclude=["blocks.0.*", "head"]')
    (model,) = trainer(world, deck).engine.stage.models
    modules = [module for layer in model.layers for module in layer.modules()]
    linear = [module for module in modules if isinstance(module, SplitLinear)]
    within = {layer.weights[0].shard.name for layer in linear if isinstance(layer.product, DelayedMatmul)}
    assert within == {
        f"blocks.1.{name}.weight"
        for name in ("attention.query", "attention.output", "feed_forward.gate", "feed_forward.down")
    }
    assert len(linear) == 8
    heads = [module for module in modules if isinstance(module, VocabularyHead)]
    assert len(heads) == 1 and not isinstance(heads[0].product, QuantizedMatmul)


@pytest.mark.parametrize(
    ("name", "patterns", "sentences"),
    [
        ("model.frozen", ["embedding.*", "*.attention_norm.weight", "blocks.0.*"], []),
        ("model.frozen", ["block.0.*"], [f'no parameter matches "block.0.*"{EXAMPLE}']),
        (
            "model.frozen",
            ["*.key.weight", "x"],
            [
                *(
                    f"freezes blocks.{block}.attention.key.weight, but not "
                    f"blocks.{block}.attention.query.weight, which is fused with it (name both or neither)"
                    for block in (0, 1)
                ),
                f'no parameter matches "x"{EXAMPLE}',
            ],
        ),
        ("model.frozen", ["*"], ["leaves nothing to train (leave out a pattern)"]),
        ("optimizer.muon.matrices", ["blocks.*", "*norm*"], []),
        ("optimizer.muon.matrices", ["*"], []),
        (
            "optimizer.muon.matrices",
            ["blocks.*", "y", "x"],
            [f'no parameter matches "{x}"{MATRIX}' for x in "yx"],
        ),
        (
            "optimizer.muon.matrices",
            ["blocks.1.*.up.weight"],
            [
                "names blocks.1.feed_forward.up.weight, but not blocks.1.feed_forward.gate.weight, "
                "which is stored with it (name both or neither)"
            ],
        ),
        ("optimizer.muon.matrices", ["*norm*"], ["names no matrix"]),
        (
            "precision.fp8_exclude",
            ["head", "embedding.*", "*.down", "blocks.1.attention.output.weight"],
            [],
        ),
        ("precision.fp8_exclude", ["*.norm.*"], [f'no linear layer matches "*.norm.*"{LAYER}']),
        (
            "precision.fp8_exclude",
            ["*.query.weight"],
            [
                f"excludes blocks.{block}.attention.query.weight, but not "
                f"blocks.{block}.attention.key.weight, which is fused with it (name both or neither)"
                for block in (0, 1)
            ],
        ),
        (
            "precision.fp8_exclude",
            ["*"],
            ['excludes all layers (precision.compute = "bf16" is equivalent)'],
        ),
    ],
)
def test_patterns_that_cannot_be_are_told(name: str, patterns: list[str], sentences: list[str]) -> None:
    deck = small_deck(*ALL, f"{name}={patterns}".replace("'", '"'))
    found = list(pattern_problems(deck, ModelShape.of(deck, 61)))
    assert found == [DeckProblem(name, sentence) for sentence in sentences]
    assert list(reference_problems(deck)) == found


def test_biases_are_frozen_without_their_weights_but_not_without_each_other() -> None:
    assert not list(reference_problems(small_deck('model.frozen=["*.attention.*.bias"]')))
    torn = reference_problems(small_deck('model.frozen=["blocks.0.*.value.bias"]'))
    assert [each.sentence for each in torn] == [
        "freezes blocks.0.attention.value.bias, but not blocks.0.attention.query.bias, which is fused with "
        "it (name both or neither)"
    ]


def test_a_run_tells_all_of_them(world: World) -> None:
    keys = 'model.frozen=["a"]', 'optimizer.muon.matrices=["b"]', 'precision.fp8_exclude=["c"]'
    deck, alone = small_deck(*ALL, *keys), world.single_rank_world()
    told = tuple(deck.problem(each.key, each.sentence) for each in reference_problems(deck))
    assert len(told) == 3
    for start in (lambda: trainer(alone, deck), lambda: verify_layout(deck, alone, Mesh(alone, {}))):
        with pytest.raises(HpctrainError) as raised:
            start()
        assert raised.value.problems == told


def test_a_miniature_without_what_patterns_name_is_no_reason_to_refuse(world: World) -> None:
    deck = small_deck(*ALL, "model.layers=5", 'optimizer.muon.matrices=["blocks.1.*"]')
    verify_layout(deck, world.single_rank_world(), Mesh(world.single_rank_world(), {}))
    assert scale_down_family(deck).value("optimizer.muon.matrices") == ("blocks.*",)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_all_ranks_refuse_a_pattern_of_which_no_stage_has_a_layer(world: World) -> None:
    layout = ("layout.pipeline=2", "layout.schedule=1f1b")
    good = small_deck(*FP8, *layout, 'precision.fp8_exclude=["blocks.0.*"]')
    trainer(world, good)
    bad = small_deck(*FP8, *layout, 'precision.fp8_exclude=["blocks.0.*", "blocks.2.*"]')
    with pytest.raises(HpctrainError, match=r'fp8_exclude=.*: no linear layer matches "blocks.2.\*"'):
        trainer(world, bad)
