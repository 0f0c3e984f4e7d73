"""Modules that a plan splits over tensor ranks take the steps of a plain torch loop on one.

Of model/foreign/split.py, model/foreign/parallel.py, model/foreign/across.py, model/foreign/own_plan.py,
and objective/of_module.py: losses of split logits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import toml_value
from hpctrain.model.foreign.find import build_module
from tests.engines import Trainer, by_rank_0, trainer
from tests.model.foreign import models
from tests.model.foreign.test_part import DECK, MODELS, STEPS, plain_loop

LLAMA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.1,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2 = {
    "vocab_size": 61,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NEOX = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.1,
    **TOKENS,
}
OWN_PLAN = "its own"

GPT_PLAN = {
    "embed": "vocabulary",
    "head": "vocabulary",
    "layers.*.attention": "gather",
    "layers.*.attention.qkv": {"split": "column", "parts": 3, "unit": 8},
    "layers.*.attention.out": "row",
    "layers.*.attention.heads": "divided",
    "layers.*.mlp.0": "column",
    "layers.*.mlp.2": "row",
    # With pieces of sequences:
    "layers.0": "cut",
    "layers.*.norm?": "sequence",
    "norm": "sequence",
    "scale": "sequence",
}
LLAMA_PLAN = {
    "model.embed_tokens": "vocabulary",
    "lm_head": "vocabulary",
    "model.layers.0": "cut",
    "model.layers.*.self_attn": "gather",
    "model.layers.*.self_attn.[qkv]_proj": {"split": "column", "unit": 8},
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.mlp": "gather",
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
    "model.layers.*.*_layernorm": "sequence",
    "model.norm": "sequence",
}
GPT2_PLAN = {
    "transformer.wte": "vocabulary",
    "lm_head": "vocabulary",
    "transformer.h.0": "cut",
    "transformer.h.*.attn": "gather",
    "transformer.h.*.attn.c_attn": {"split": "column", "parts": 3, "unit": 8},
    "transformer.h.*.attn.c_proj": "row",
    "transformer.h.*.attn.split_size": "divided",
    "transformer.h.*.mlp.c_fc": "column",
    "transformer.h.*.mlp.c_proj": "row",
    "transformer.h.*.ln_?": "sequence",
    "transformer.ln_f": "join",
}
PHI3_PLAN = {
    "model.embed_tokens": "vocabulary",
    "lm_head": "vocabulary",
    "model.layers.0": "cut",
    "model.layers.*.self_attn.qkv_proj": {"split": "column", "parts": [32, 16, 16], "unit": 8},
    "model.layers.*.self_attn": "gather",
    "model.layers.*.self_attn.num_key_value_heads": "divided",
    "model.layers.*.self_attn.config.num_attention_heads": "divided",
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.mlp.gate_up_proj": {"split": "column", "parts": 2},
    "model.layers.*.mlp.down_proj": "row",
    "model.layers.*.*_layernorm": "sequence",
    "model.norm": "sequence",
}
QWEN3_PLAN = LLAMA_PLAN | {"model.layers.*.self_attn.?_norm": "partial"}
NEOX_PLAN = {
    "gpt_neox.embed_in": "vocabulary",
    "lm_head": "vocabulary",
    "gpt_neox.layers.0": "cut",
    "gpt_neox.layers.*.attention.query_key_value": {"split": "column", "unit": 24},
    "gpt_neox.layers.*.attention.dense": "row",
    "gpt_neox.layers.*.attention": "gather",
    "gpt_neox.layers.*.mlp.dense_h_to_4h": "column",
    "gpt_neox.layers.*.mlp.dense_4h_to_h": "row",
    "gpt_neox.layers.*.*_layernorm": "sequence",
    "gpt_neox.final_layer_norm": "sequence",
}

KINDS: dict[str, tuple[str, str, dict[str, Any], Any]] = {
    "gpt": (f"{MODELS}:gpt", "layers.*", {"layers": 2}, GPT_PLAN),
    "llama": ("transformers:LlamaForCausalLM", "model.layers.*", LLAMA, LLAMA_PLAN),
    "gpt2": ("transformers:GPT2LMHeadModel", "transformer.h.*", GPT2, GPT2_PLAN),
    "mistral": (
        "transformers:MistralForCausalLM",
        "model.layers.*",
        LLAMA | {"sliding_window": 8},
        LLAMA_PLAN,
    ),
    "qwen2": ("transformers:Qwen2ForCausalLM", "model.layers.*", LLAMA, LLAMA_PLAN),
    "qwen3": ("transformers:Qwen3ForCausalLM", "model.layers.*", LLAMA | {"head_dim": 8}, QWEN3_PLAN),
    "phi3": ("transformers:Phi3ForCausalLM", "model.layers.*", LLAMA | TOKENS, PHI3_PLAN),
    "neox": ("transformers:GPTNeoXForCausalLM", "gpt_neox.layers.*", NEOX, NEOX_PLAN),
    "tied": (
        "transformers:LlamaForCausalLM",
        "model.layers.*",
        LLAMA | {"tie_word_embeddings": True},
        LLAMA_PLAN,
    ),
    "gemma3": (
        "transformers:Gemma3ForCausalLM",
        "model.layers.*",
        LLAMA | {"head_dim": 8, "sliding_window": 8} | TOKENS,
        OWN_PLAN,
    ),
}
TENSOR = ("layout.tensor=2",)
PIECES = (*TENSOR, "layout.sequence_parallel=true")


def deck_of(kind: str, *overrides: str, plan: Any = None) -> Deck:
    target, blocks, arguments, own = KINDS[kind]
    rows = "\n".join(f"{name} = {toml_value(value)}" for name, value in arguments.items())
    more = f"plan = {toml_value(plan or own)}"
    text = DECK.format(module=target, blocks=blocks, more=more, arguments=rows)
    return parse_deck(text, overrides)


def whole_parameters(training: Trainer, world: World) -> dict[str, Tensor]:
    """All parameters, put together of all ranks' pieces. Collective."""
    whole: dict[str, Tensor] = {}
    pieces = [
        (segment.parameter.shard, segment.view(bucket.gathered(bucket.own_values)).detach().float().clone())
        for bucket in training.engine.buckets
        for segment in bucket.segments
    ]
    covered: dict[str, Tensor] = {}
    for shard, piece in (each for of_rank in world.everyone.all_gather_object(pieces) for each in of_rank):
        target = whole.setdefault(shard.name, torch.zeros(shard.shape))
        own = piece[tuple(slice(0, size) for size in shard.extent)]
        known = covered.setdefault(shard.name, torch.zeros(shard.shape, dtype=torch.bool))
        assert torch.equal(target[shard.slices][known[shard.slices]], own[known[shard.slices]]), shard.name
        target[shard.slices], known[shard.slices] = own, True
    assert all(bool(each.all()) for each in covered.values())
    return whole


def assert_equal_steps(world: World, deck: Deck, steps: int = STEPS) -> None:
    """A run of a layout takes the steps of the plain loop."""
    training = trainer(world, deck)
    weights = whole_parameters(training, world)
    target, arguments = str(deck.model.module), deck.model.arguments or {}

    def alone() -> tuple[list[list[float]], dict[str, Tensor]]:
        own = getattr(models, target.rpartition(":")[2], None)
        model = build_module(target, arguments) if own is None else own(**arguments)
        figures, model = plain_loop(training, model, weights, steps, micro=deck.batch.micro_size)
        return figures, {name: value.detach() for name, value in model.named_parameters()}

    figures, expected = by_rank_0(world, alone)
    found = [[result.loss, result.grad_norm] for result in training.train(steps)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(figures), rtol=1e-5, atol=0.0)
    here = whole_parameters(training, world)
    assert here.keys() == expected.keys()
    for name, value in here.items():
        assert (value - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), name
        assert not torch.equal(value, weights[name]), name


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("kind", KINDS)
def test_tensor_ranks_take_the_steps_of_a_plain_loop(world: World, kind: str) -> None:
    assert_equal_steps(world, deck_of(kind, *TENSOR))


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("kind", [kind for kind, (*_, plan) in KINDS.items() if plan != OWN_PLAN])
def test_pieces_of_sequences_take_the_steps_of_a_plain_loop(world: World, kind: str) -> None:
    assert_equal_steps(world, deck_of(kind, *PIECES))
