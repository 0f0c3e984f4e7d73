"""Mixtures against three families of transformers, from rough weights: losses, logits, every gradient."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.deck.sections.experts import ExpertsTable
from hpctrain.model.inputs import AuxiliaryLosses, ModelInputs
from hpctrain.model.part import logits_of, parameter_list
from hpctrain.model.shape import ModelShape
from hpctrain.model.transformer import Transformer
from hpctrain.objective.next_token import CrossEntropy
from hpctrain.sharding.reducer import ExactReduction, Reducer
from hpctrain.sharding.replica_sync import SyncEveryStep
from hpctrain.sharding.replication import Replications
from hpctrain.sharding.synchronize import GradientSynchronizer
from tests.engines import alone, make_buckets

transformers = pytest.importorskip("transformers")

SHAPE = ModelShape(
    family="llama",
    layers=2,
    hidden=48,
    heads=6,
    key_value_heads=2,
    mlp=40,
    vocabulary=97,
    sequence=24,
    tied=False,
    norm_epsilon=1e-6,
    experts=ExpertsTable(count=6, per_token=3, mlp=40, balance="none", balance_loss=0.0),
)


def with_keys(shape: ModelShape, **keys: Any) -> ModelShape:
    """Return a shape with other keys of [model.experts]."""
    assert shape.experts is not None
    return replace(shape, experts=ExpertsTable(**{**dict(shape.experts), **keys}))


COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "output_router_logits": True,
    "rope_theta": 10000.0,
    "pad_token_id": None,
    "eos_token_id": None,
}


def mixtral(layers: int, weight: float, hidden_act: str = "silu") -> Any:
    config = transformers.MixtralConfig(
        **COMMON,
        num_hidden_layers=layers,
        num_local_experts=6,
        hidden_act=hidden_act,
        intermediate_size=40,
        router_aux_loss_coef=weight,
    )
    return transformers.MixtralForCausalLM(config)


def qwen3(layers: int, weight: float) -> Any:
    config = transformers.Qwen3MoeConfig(
        **COMMON,
        num_hidden_layers=layers,
        num_experts=6,
        moe_intermediate_size=40,
        intermediate_size=40,
        head_dim=8,
        norm_topk_prob=True,
        router_aux_loss_coef=weight,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def olmoe(layers: int, weight: float) -> Any:
    config = transformers.OlmoeConfig(
        **COMMON,
        num_hidden_layers=layers,
        num_experts=6,
        intermediate_size=40,
        norm_topk_prob=False,
        router_aux_loss_coef=weight,
    )
    return transformers.OlmoeForCausalLM(config)


FAMILIES = {
    "mixtral": (mixtral, SHAPE),
    "mixtral-geglu": (partial(mixtral, hidden_act="gelu_pytorch_tanh"), replace(SHAPE, activation="geglu")),
    "qwen3": (qwen3, replace(SHAPE, query_key_norm="head")),
    "olmoe": (olmoe, with_keys(replace(SHAPE, query_key_norm="all"), router_normalize=False)),
}


def our_names(theirs: dict[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    ours = {
        "embedding.tokens.weight": theirs["model.embed_tokens.weight"],
        "final_norm.weight": theirs["model.norm.weight"],
        "head.weight": theirs["lm_head.weight"],
    }
    for layer in range(shape.layers):
        old, new = f"model.layers.{layer}", f"blocks.{layer}"
        for theirs_name, ours_name in {
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "feed_forward_norm",
            "self_attn.q_proj": "attention.query",
            "self_attn.k_proj": "attention.key",
            "self_attn.v_proj": "attention.value",
            "self_attn.o_proj": "attention.output",
            "self_attn.q_norm": "attention.query_norm",
            "self_attn.k_norm": "attention.key_norm",
            "mlp.gate": "feed_forward.router",
        }.items():
            if f"{old}.{theirs_name}.weight" in theirs:
                ours[f"{new}.{ours_name}.weight"] = theirs[f"{old}.{theirs_name}.weight"]
        both = theirs[f"{old}.mlp.experts.gate_up_proj"]
        ours[f"{new}.feed_forward.experts.gate_up.weight"] = both.view(len(both), 2, -1, both.shape[-1])
        ours[f"{new}.feed_forward.experts.down.weight"] = theirs[f"{old}.mlp.experts.down_proj"]
    return ours


def rough(model: torch.nn.Module) -> torch.nn.Module:
    """No two tensors alike, and routers that are far from undecided."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def compare(family: str, layers: int, weight: float, world: Any) -> tuple[Tensor, Tensor]:
    """Assert that losses, logits and gradients are theirs; both balance losses."""
    torch.manual_seed(0)
    make, shape = FAMILIES[family]
    shape = replace(shape, layers=layers)
    if weight:
        # Theirs counts a token once for each of its experts.
        assert shape.experts is not None
        shape = with_keys(shape, balance="loss", balance_loss=weight * shape.experts.per_token)
    reference = rough(make(layers, weight))
    layer_context = alone(world)
    model = Transformer(shape, layer_context)
    buckets = make_buckets(
        model.units(), Replications.of_one_rank(layer_context.tensor), torch.float32, 10_000
    )
    weights = our_names(dict(reference.named_parameters()), shape)
    assert {p.shard.name for p in parameter_list(model)} == set(weights)
    with torch.no_grad():
        for parameter in parameter_list(model):
            parameter.copy_(weights[parameter.shard.name])
    reducers = [Reducer(bucket, ExactReduction(bucket)) for bucket in buckets]
    synchronizer = GradientSynchronizer(reducers, SyncEveryStep())

    tokens = torch.randint(0, 97, (2, 25))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    theirs = reference(inputs)
    torch.testing.assert_close(logits_of(model, inputs), theirs.logits, rtol=1e-5, atol=1e-5)
    loss = torch.nn.functional.cross_entropy(theirs.logits.reshape(-1, 97), targets.reshape(-1))
    (loss + weight * theirs.aux_loss).backward()

    synchronizer.start(1)
    terms = AuxiliaryLosses(torch.tensor(1 / 48))
    hidden = model(ModelInputs.of_tokens(inputs.t().contiguous(), torch.arange(24), auxiliary_losses=terms))
    ours = model.predict(hidden, CrossEntropy(targets.t(), torch.tensor(1 / 48))).total
    ours.backward()
    synchronizer.finish()
    torch.testing.assert_close(ours.detach() / 48, loss.detach(), rtol=1e-6, atol=1e-6)
    gradients = our_names({name: p.grad for name, p in reference.named_parameters()}, shape)
    for parameter in parameter_list(model):
        expected = gradients[parameter.shard.name]
        difference = (parameter.gradient - expected).abs().max() / expected.abs().max()
        assert difference <= 1e-5, (parameter.shard.name, difference)
    sums = torch.zeros(1, dtype=torch.float64)
    if weight:
        terms.add_to(sums, ("balance_loss",))
    return sums[0] / 48, theirs.aux_loss.detach()


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_logits_and_gradients_are_those_of_transformers(family: str, world: Any) -> None:
    compare(family, 2, 0.0, world)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_balance_loss_of_one_layer_is_theirs_over_the_choices(family: str, world: Any) -> None:
    ours, theirs = compare(family, 1, 0.5, world)
    torch.testing.assert_close(ours.float(), theirs / 3, rtol=1e-6, atol=0)
