"""Our transformer against GPT-2, Llama and Qwen3 of `transformers` with the same random weights.

Tests of model/attention/self_attention.py, model/block.py, model/part.py and model/transformer.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.deck.sections.rope_scaling import RopeScaling
from hpctrain.model.count import count
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.part import logits_of, parameter_list
from hpctrain.model.shape import ModelShape
from hpctrain.model.transformer import Transformer
from hpctrain.objective.next_token import CrossEntropy
from hpctrain.sharding.reducer import ExactReduction, Reducer
from hpctrain.sharding.replica_sync import SyncEveryStep
from hpctrain.sharding.replication import Replications
from hpctrain.sharding.synchronize import GradientSynchronizer
from tests.engines import alone, make_buckets
from tests.rope_scalings import SCALINGS, hf_rope_parameters

transformers = pytest.importorskip("transformers")

GPT2 = ModelShape(
    family="gpt2",
    layers=3,
    hidden=32,
    heads=4,
    key_value_heads=4,
    mlp=128,
    vocabulary=97,
    sequence=24,
    tied=True,
)
LLAMA = ModelShape(
    family="llama",
    layers=3,
    hidden=48,
    heads=6,
    key_value_heads=2,
    mlp=80,
    vocabulary=97,
    sequence=24,
    tied=False,
    norm_epsilon=1e-6,
)
QWEN2 = replace(LLAMA, attention_bias="query_key_value")
QWEN3 = replace(LLAMA, head_size=12, query_key_norm="head", attention_bias="all")


def roughen(model: torch.nn.Module) -> torch.nn.Module:
    """Biases and norm weights that differ, as training leaves them: alike, they stand in for each other."""
    with torch.no_grad():
        for parameter in model.parameters():
            if bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def gpt2_reference() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The Hugging Face model, and its weights under our names and in our orientation."""
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=24, n_embd=32, n_layer=3, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, attn_implementation="eager",
    )  # fmt: skip
    model = roughen(transformers.GPT2LMHeadModel(config))
    return model, gpt2_names(dict(model.named_parameters()))


def gpt2_names(theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ours = {
        "embedding.tokens.weight": theirs["transformer.wte.weight"],
        "embedding.positions.weight": theirs["transformer.wpe.weight"],
        "final_norm.weight": theirs["transformer.ln_f.weight"],
        "final_norm.bias": theirs["transformer.ln_f.bias"],
    }
    for layer in range(3):
        for kind in ("weight", "bias"):
            old, new = f"transformer.h.{layer}", f"blocks.{layer}"
            ours[f"{new}.attention_norm.{kind}"] = theirs[f"{old}.ln_1.{kind}"]
            ours[f"{new}.feed_forward_norm.{kind}"] = theirs[f"{old}.ln_2.{kind}"]
            joint = theirs[f"{old}.attn.c_attn.{kind}"]
            for name, part in zip(("query", "key", "value"), joint.chunk(3, dim=-1), strict=True):
                ours[f"{new}.attention.{name}.{kind}"] = part.t()
            ours[f"{new}.attention.output.{kind}"] = theirs[f"{old}.attn.c_proj.{kind}"].t()
            ours[f"{new}.feed_forward.up.{kind}"] = theirs[f"{old}.mlp.c_fc.{kind}"].t()
            ours[f"{new}.feed_forward.down.{kind}"] = theirs[f"{old}.mlp.c_proj.{kind}"].t()
    return ours


def llama_reference(scaling: RopeScaling | None = None) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=12 if scaling and scaling.kind == "dynamic" else 24,
        rms_norm_eps=1e-6, rope_parameters=hf_rope_parameters(scaling, 10000.0),
        tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    model = roughen(transformers.LlamaForCausalLM(config))
    return model, llama_names(dict(model.named_parameters()))


def qwen2_reference() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.Qwen2Config(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=24, rms_norm_eps=1e-6, rope_theta=10000.0,
        tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    model = roughen(transformers.Qwen2ForCausalLM(config))
    return model, llama_names(dict(model.named_parameters()))


def qwen3_reference() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.Qwen3Config(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=24, rms_norm_eps=1e-6,
        rope_theta=10000.0, tie_word_embeddings=False, attn_implementation="eager", attention_bias=True,
    )  # fmt: skip
    model = roughen(transformers.Qwen3ForCausalLM(config))
    return model, qwen3_names(dict(model.named_parameters()))


def qwen3_names(theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ours = llama_names(theirs)
    for layer in range(3):
        for kind, letter in (("query", "q"), ("key", "k")):
            name = f"model.layers.{layer}.self_attn.{letter}_norm.weight"
            ours[f"blocks.{layer}.attention.{kind}_norm.weight"] = theirs[name]
    return ours


def llama_names(theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ours = {
        "embedding.tokens.weight": theirs["model.embed_tokens.weight"],
        "final_norm.weight": theirs["model.norm.weight"],
        "head.weight": theirs["lm_head.weight"],
    }
    for layer in range(3):
        old, new = f"model.layers.{layer}", f"blocks.{layer}"
        for theirs_name, ours_name in {
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "feed_forward_norm",
            "self_attn.q_proj": "attention.query",
            "self_attn.k_proj": "attention.key",
            "self_attn.v_proj": "attention.value",
            "self_attn.o_proj": "attention.output",
            "mlp.gate_proj": "feed_forward.gate",
            "mlp.up_proj": "feed_forward.up",
            "mlp.down_proj": "feed_forward.down",
        }.items():
            for kind in ("weight", "bias"):
                if (tensor := theirs.get(f"{old}.{theirs_name}.{kind}")) is not None:
                    ours[f"{new}.{ours_name}.{kind}"] = tensor
    return ours


REFERENCES = {
    GPT2: gpt2_reference,
    LLAMA: llama_reference,
    QWEN2: qwen2_reference,
    QWEN3: qwen3_reference,
}


@pytest.mark.parametrize("shape", [GPT2, LLAMA, QWEN2, QWEN3], ids=["gpt2", "llama", "qwen2", "qwen3"])
def test_loss_logits_and_gradients_are_those_of_transformers(shape: ModelShape, world) -> None:
    torch.manual_seed(0)
    make = REFERENCES[shape]
    names = qwen3_names if shape == QWEN3 else gpt2_names if shape == GPT2 else llama_names
    expect_same_training(shape, *make(), names, world)


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_rotary_positions_are_those_of_transformers(name: str, world) -> None:
    torch.manual_seed(0)
    shape = replace(LLAMA, rope_scaling=SCALINGS[name])
    expect_same_training(shape, *llama_reference(SCALINGS[name]), llama_names, world)


def expect_same_training(
    shape: ModelShape,
    reference: torch.nn.Module,
    weights: dict[str, torch.Tensor],
    names: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    world: World,
) -> None:
    """Compare logits, loss and gradients of a model with those of `transformers` with the same weights."""
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    layer_context = alone(world)
    model = Transformer(shape, layer_context)
    buckets = make_buckets(
        model.units(), Replications.of_one_rank(layer_context.tensor), torch.float32, 10_000
    )
    assert {p.shard.name for p in parameter_list(model)} == set(weights)
    with torch.no_grad():
        for parameter in parameter_list(model):
            parameter.copy_(weights[parameter.shard.name])
    reducers = [Reducer(bucket, ExactReduction(bucket)) for bucket in buckets]
    synchronizer = GradientSynchronizer(reducers, SyncEveryStep())

    tokens = torch.randint(0, 97, (2, 25))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, :5] = -1
    logits = reference(inputs).logits
    torch.testing.assert_close(logits_of(model, inputs), logits, rtol=1e-5, atol=1e-5)
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, 97), targets.reshape(-1), ignore_index=-1, reduction="sum"
    )
    (loss / 43).backward()

    synchronizer.start(1)
    hidden = model(ModelInputs.of_tokens(inputs.t().contiguous(), torch.arange(24)))
    ours = model.predict(hidden, CrossEntropy(targets.t(), torch.tensor(1 / 43))).total
    ours.backward()
    synchronizer.finish()
    torch.testing.assert_close(ours.detach(), loss.detach(), rtol=1e-6, atol=1e-6)
    gradients = names({name: p.grad for name, p in reference.named_parameters() if p.grad is not None})
    for parameter in parameter_list(model):
        torch.testing.assert_close(
            parameter.gradient,
            gradients[parameter.shard.name],
            rtol=1e-4,
            atol=2e-6,
            msg=parameter.shard.name,
        )


def test_parameter_counts(world) -> None:
    for shape in (GPT2, LLAMA, QWEN2, QWEN3):
        model = Transformer(shape, alone(world))
        assert sum(p.numel() for p in parameter_list(model)) == count(shape).parameters
    gpt2 = replace(
        GPT2,
        layers=12,
        hidden=768,
        heads=12,
        head_size=64,
        key_value_heads=12,
        mlp=3072,
        vocabulary=50257,
        sequence=1024,
    )
    assert count(gpt2).parameters == 124_439_808
    llama = replace(
        LLAMA,
        layers=32,
        hidden=4096,
        heads=32,
        head_size=128,
        key_value_heads=32,
        mlp=11008,
        vocabulary=32000,
        sequence=2048,
    )
    assert count(llama).parameters == 6_738_415_616
