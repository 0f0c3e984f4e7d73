"""Families of the table, with rough weights and uncommon sizes, beside the models of `transformers`.

Tests of deck/family.py, of deck/families/deepseek.py, deck/families/gemma.py, deck/families/layer_norms.py
and deck/families/llama_variants.py, of parallel/kernels/normalization.py, and of
checkpoint/exchange/hugging_face/architectures.py and checkpoint/exchange/hugging_face/expert_order.py.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.checkpoint.exchange.convert import export_model, import_model
from hpctrain.checkpoint.exchange.hugging_face.architectures import ARCHITECTURES
from hpctrain.checkpoint.exchange.hugging_face.config_reader import shape_of
from hpctrain.checkpoint.exchange.source import open_model, source_shape
from hpctrain.checkpoint.load import load
from hpctrain.checkpoint.state_entries import model_entries
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.deck.families import FAMILIES
from hpctrain.errors import HpctrainError
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.mixtures.router import Router
from hpctrain.model.part import parameter_list
from hpctrain.model.transformer import Transformer
from hpctrain.objective.next_token import CrossEntropy
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.sharding.reducer import ExactReduction, Reducer
from hpctrain.sharding.replica_sync import SyncEveryStep
from hpctrain.sharding.replication import Replications
from hpctrain.sharding.synchronize import GradientSynchronizer
from tests.checkpoint.exchange.test_hugging_face import assert_same_bits, no_warnings, tensors_of
from tests.engines import make_buckets

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors.torch")

VOCABULARY, SEQUENCE, LAYERS = 61, 24, 3
USUAL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQUENCE,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
UNDROPPED = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
YARN = {
    "rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 6,
    "beta_fast": 2.0,
    "mscale": 0.7, "mscale_all_dim": 0.7,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 6, "kv_lora_rank": 10, "q_lora_rank": 14, "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 8,
    "v_head_dim": 5, "rope_parameters": YARN, "moe_intermediate_size": 20,
    "n_routed_experts": 6, "num_experts_per_tok": 2,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "n_group": 3,
    "topk_group": 2,
}  # fmt: skip
QWEN2_MOE = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 60,
}
GPT_OSS = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "head_dim": 10,
    "sliding_window": 7,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 300.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 6,
    },
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2": (
        "DeepseekV2",
        {**LATENT, "topk_method": "group_limited_greedy", "num_experts_per_tok": 3},
    ),
    "deepseek-v2-lite": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "v_head_dim": 14}),
    "deepseek-v3": ("DeepseekV3", LATENT),
    "deepseek-v3-plain": (
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": None,
            "kv_lora_rank": 9,
            "rope_parameters": {**YARN, "mscale": None, "mscale_all_dim": 1.0},
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek-v3-short": ("DeepseekV3", {**LATENT, "rope_parameters": None, "n_group": 1, "topk_group": 1}),
    "gemma": ("Gemma", {"head_dim": 10, "rms_norm_eps": 1e-5}),
    "gemma-untied": ("Gemma", {"head_dim": 10, "tie_word_embeddings": False}),
    "olmo": ("Olmo", {}),
    "olmo-tied": ("Olmo", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "olmo-clipped": ("Olmo", {"clip_qkv": 0.3}),
    "olmo2": ("Olmo2", {}),
    "olmo2-heads": ("Olmo2", {"head_dim": 10, "attention_bias": True}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.5,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 7.0,
            "tie_word_embeddings": True,
        },
    ),
    "neox": (
        "GPTNeoX",
        {
            "num_key_value_heads": None,
            "hidden_size": 84,
            "num_attention_heads": 6,
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 3.0,
                "rope_theta": 700.0,
                "partial_rotary_factor": 0.45,
            },
        },
    ),
    "neox-sequential": (
        "GPTNeoX",
        {
            "hidden_size": 48,
            "attention_bias": False,
            "use_parallel_residual": False,
            "hidden_act": "gelu_new",
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
        },
    ),
    "stablelm": ("StableLm", {"hidden_size": 48}),
    "stablelm-parallel": (
        "StableLm",
        {"hidden_size": 48, "use_parallel_residual": True, "use_qkv_bias": True},
    ),
    "stablelm-normed": (
        "StableLm",
        {"hidden_size": 48, "use_parallel_residual": True, "qk_layernorm": True, "layer_norm_eps": 1e-3},
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": None}),
    "starcoder2-unbiased": ("Starcoder2", {"use_bias": False, "head_dim": 8, "tie_word_embeddings": False}),
    "cohere": ("Cohere", {"logit_scale": 0.3}),
    "cohere-heads": ("Cohere", {"head_dim": 10, "attention_bias": True}),
    "cohere-normed": ("Cohere", {"head_dim": 10, "use_qk_norm": True, "layer_norm_eps": 1e-3}),
    "glm": ("Glm", {"head_dim": 12}),
    "glm4": ("Glm4", {"head_dim": 12, "attention_bias": False, "partial_rotary_factor": 0.5}),
    "ernie": ("Ernie4_5", {"head_dim": 10}),
    "ernie-biased": ("Ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "phi3": ("Phi3", {}),
    "phi3-partial": (
        "Phi3",
        {
            "hidden_size": 48,
            "original_max_position_embeddings": 12,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 300.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2],
                "long_factor": [1.0, 2.0, 4.5],
                "original_max_position_embeddings": 12,
            },
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3-listed": ("SmolLM3", {"no_rope_layers": [0, 1, 1], "mlp_bias": True, "attention_bias": True}),
    "gpt2": ("GPT2", {"num_key_value_heads": None, "n_positions": SEQUENCE, "n_inner": 44, **UNDROPPED}),
    "llama": ("Llama", {"head_dim": 10, "attention_bias": True}),
    "llama-biased": ("Llama", {"mlp_bias": True}),
    "llama-arcee": ("Arcee", {"tie_word_embeddings": True, "mlp_bias": True}),
    "llama-mistral": ("Mistral", {"sliding_window": None}),
    "llama-qwen2": ("Qwen2", {"head_dim": 10}),
    "llama-qwen3": ("Qwen3", {"head_dim": 10, "attention_bias": True}),
    "cohere2": ("Cohere2", {"sliding_window": 5, "sliding_window_pattern": 3, "logit_scale": 0.3}),
    "cohere2-full": ("Cohere2", {"layer_types": ["full_attention"] * 3, "attention_bias": True}),
    "gemma2": ("Gemma2", {"head_dim": 10, "sliding_window": 7, "query_pre_attn_scalar": 3}),
    "gemma2-uncapped": (
        "Gemma2",
        {
            "head_dim": 10,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": ["full_attention"] * 3,
        },
    ),
    "gemma2-capped": (
        "Gemma2",
        {"head_dim": 10, "sliding_window": 5, "attn_logit_softcapping": 0.8, "query_pre_attn_scalar": 2},
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 10,
            "sliding_window": 5,
            "query_pre_attn_scalar": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
            },
        },
    ),
    "gemma3-usual": ("Gemma3Text", {"head_dim": 10, "sliding_window": 6, "sliding_window_pattern": 2}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 9,
            "head_dim": 10,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 3.0,
                    "rope_theta": 300.0,
                    "original_max_position_embeddings": 8,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "olmo3-usual": ("Olmo3", {"sliding_window": 4}),
    "llama-mistral-window": ("Mistral", {"sliding_window": 7, "head_dim": 10}),
    "llama-ministral": (
        "Ministral",
        {
            "head_dim": 10,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "llama-qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "head_dim": 10},
    ),
    "llama-qwen3-window": (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 23,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
    "starcoder2-window": ("Starcoder2", {"sliding_window": 9}),
    "phi3-window": ("Phi3", {"sliding_window": 2}),
    "llama-qwen2-moe": ("Qwen2Moe", QWEN2_MOE),
    "llama-qwen2-moe-window": (
        "Qwen2Moe",
        {**QWEN2_MOE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
    ),
    "llama-qwen2-moe-listed": (
        "Qwen2Moe",
        {**QWEN2_MOE, "mlp_only_layers": [1], "norm_topk_prob": True, "qkv_bias": False},
    ),
    "granite-moe": (
        "GraniteMoe",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 3.5,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 7.0,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss-plain": (
        "GptOss",
        {
            **GPT_OSS,
            "attention_bias": False,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "granite-biased": ("Granite", {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.4}),
    "llama-mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "llama-qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    ),
    "llama-olmoe": ("Olmoe", {"num_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 6}),
    "llama-dots1": (
        "Dots1",
        {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "max_window_layers": 3,
        },
    ),
}
"""Class of `transformers` and keys of its config, by the name of a case. The name begins with the family."""


_CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}


def reference(name: str, **changes: Any) -> torch.nn.Module:
    """Return a model of `transformers` whose parameters are all rough."""
    kind, keys = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**{**USUAL, **keys, **changes})
    torch.manual_seed(7)
    model = getattr(transformers, _CLASSES.get(kind, f"{kind}ForCausalLM"))(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    return model.eval()


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the norm of a difference, relative to the norm of what is expected."""
    return float((found - expected).norm() / expected.norm().clamp_min(1e-12))


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_transformers(name: str, world: World, tmp_path: Path) -> None:
    theirs = reference(name)
    theirs.save_pretrained(tmp_path / "theirs")
    import_model(world, tmp_path / "theirs", tmp_path / "model.h5")
    shape = source_shape(tmp_path / "model.h5")
    if shape.experts is not None:
        shape = replace(shape, experts=shape.experts.model_copy(update={"balance_loss": 0.0}))
    assert f"{name}-".startswith(f"{shape.family}-") and shape.family in FAMILIES

    lone = world.single_rank_world()
    mesh = Mesh(lone, {})
    model = Transformer(shape, LayerContext(tensor=mesh.group("tensor"), context=mesh.group("context")))
    buckets = make_buckets(model.units(), Replications.unsharded(mesh), torch.float32, 10_000)
    load(tmp_path / "model.h5", lone.everyone, model_entries(buckets))
    copy_router_biases(theirs, model)
    synchronizer = GradientSynchronizer(
        [Reducer(bucket, ExactReduction(bucket)) for bucket in buckets], SyncEveryStep()
    )
    tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = theirs(inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()

    synchronizer.start(1)
    hidden = model(ModelInputs.of_tokens(inputs.t().contiguous(), torch.arange(SEQUENCE)))
    own_logits = model.predict(hidden, lambda head, last: head.logits(last).detach()).transpose(0, 1)
    assert distance(own_logits, logits.detach()) < 1e-5
    objective = CrossEntropy(targets.t(), torch.tensor(1 / targets.numel()))
    own_loss = model.predict(hidden, objective).total
    own_loss.backward()
    synchronizer.finish()
    torch.testing.assert_close(own_loss.detach() / targets.numel(), loss.detach(), rtol=1e-5, atol=0)
    of_gradients = deepcopy(theirs)
    for parameter, source in zip(of_gradients.parameters(), theirs.parameters(), strict=True):
        parameter.data = torch.zeros_like(source) if source.grad is None else source.grad.clone()
    expected = own_tensors(of_gradients, tmp_path / "gradients")
    for parameter in parameter_list(model):
        gradient = expected.pop(parameter.shard.name)
        if parameter.shard.name.endswith("key.bias") and gradient.norm() < 1e-6:
            assert parameter.gradient.norm() < 1e-6  # softmax does not depend on it without rotation
            continue
        assert distance(parameter.gradient, gradient) < 1e-5, parameter.shard.name
    assert not expected


def copy_router_biases(theirs: torch.nn.Module, model: Transformer) -> None:
    """Give routers the biases of those of `transformers`."""
    for router in model.modules():
        if isinstance(router, Router) and router.bias is not None:
            gate = theirs.get_submodule(f"model.layers.{router.name.split('.')[1]}.mlp.gate")
            router.bias.copy_(gate.e_score_correction_bias)


def own_tensors(model: torch.nn.Module, folder: Path) -> dict[str, Tensor]:
    """Return the parameters of a model of `transformers` by our names, as they are read from its files."""
    model.save_pretrained(folder)
    files = open_model(folder)
    shapes = {name: shape for name, shape in files.shapes.items() if name.startswith("/model/")}
    return {
        name.removeprefix("/model/"): files.read(name, (0,) * len(shape), shape)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_import_and_export_keep_bits(name: str, world: World, tmp_path: Path) -> None:
    theirs = reference(name)
    theirs.save_pretrained(tmp_path / "theirs")
    import_model(world, tmp_path / "theirs", tmp_path / "model.h5")
    export_model(world, tmp_path / "model.h5", tmp_path / "ours", None, 10**9)
    assert_same_bits(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs"))
    with no_warnings():
        again = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "ours", attn_implementation="eager"
        )
    assert type(again) is type(theirs)
    tokens = torch.arange(SEQUENCE).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens).logits, theirs(tokens).logits)
    import_model(world, tmp_path / "ours", tmp_path / "again.h5")
    assert source_shape(tmp_path / "again.h5") == source_shape(tmp_path / "model.h5")


@pytest.mark.parametrize("name", ["gemma", "olmo2", "neox", "stablelm", "cohere", "glm4"])
def test_windows_of_families_without_are_refused(name: str, world: World, tmp_path: Path) -> None:
    reference(name).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 4}))
    with pytest.raises(
        HpctrainError, match=r"config\.json: sliding_window = 4: .* ignore this key"
    ) as caught:
        import_model(world, tmp_path, tmp_path / "model.h5")
    assert caught.value.exit_code == 2


def test_caps_of_gemma3_that_transformers_ignores_are_refused() -> None:
    config = {"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0}
    assert shape_of(config, "config.json").logit_cap == 30.0
    with pytest.raises(HpctrainError, match=r"attn_logit_softcapping = 50\.0: unsupported; expected None"):
        shape_of({**config, "attn_logit_softcapping": 50.0}, "config.json")


def test_gelu_of_published_gemma_configs_is_gelu_by_tanh() -> None:
    config = {"architectures": ["GemmaForCausalLM"], "hidden_act": "gelu", "hidden_activation": None}
    assert shape_of(config, "config.json").activation == "geglu"
    assert transformers.GemmaConfig(hidden_act="gelu").hidden_act == "gelu_pytorch_tanh"
    assert "geglu-exact" not in ARCHITECTURES["GemmaForCausalLM"].activations
