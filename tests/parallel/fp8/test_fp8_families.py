"""Models of all families in 8 bits: their losses are those of fp32, but for the rounding.

Tests of parallel/fp8/quantized_matmul.py with the norms, biases and residuals of families.
"""

from __future__ import annotations

import pytest

from hpctrain.comm.world import World
from hpctrain.deck.families import FAMILIES
from hpctrain.parallel.fp8.recipes import RECIPES
from tests.engines import LLAMA, small_deck, trainer

FAMILY_KEYS = {name: (*LLAMA, f"model.family={name}", "model.head_size=8") for name in FAMILIES}
FAMILY_KEYS["gpt2"] = ()
LATENT = ("model.latent.key_value_rank=10", "model.latent.rotary_size=4", "model.latent.value_size=6")
for family in (name for name, each in FAMILIES.items() if each.has_latents):
    FAMILY_KEYS[family] = (f"model.family={family}", "model.mlp=48", "model.head_size=12", *LATENT)
KEYS = {
    **FAMILY_KEYS,
    "normed-heads": (*FAMILY_KEYS["cohere"], "model.query_key_norm=layer_per_head"),
    "clipped": (*LLAMA, "model.query_key_value_clip=0.1"),
    "two-norms": (*LLAMA, "model.parallel_residual=two_norms", "model.mlp_bias=true"),
    "both": (*LLAMA, "model.norm_placement=both", "model.norm_weight=one_plus", "model.query_key_norm=head"),
}
CASES = [(name, recipe) for name in KEYS for recipe in RECIPES]


@pytest.mark.sampled(4)
@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_losses_are_those_of_fp32(world: World, name: str, recipe: str) -> None:
    more = () if recipe == "delayed" else (f"precision.fp8={recipe}",)
    exact = [step.loss for step in trainer(world, small_deck(*KEYS[name])).train(3)]
    deck = small_deck(*KEYS[name], "precision.compute=fp8", *more)
    found = [step.loss for step in trainer(world, deck).train(3)]
    assert found != exact
    assert found == pytest.approx(exact, rel=2e-2)
