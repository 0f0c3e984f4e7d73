"""Families of mixtures in the table, with rough weights and uncommon sizes, beside those of `transformers`.

Tests of checkpoint/exchange/expert_order.py, too.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.checkpoint.entries import model_entries
from hpctrain.checkpoint.exchange.convert import export_model, import_model
from hpctrain.checkpoint.exchange.hugging_face import shape_of
from hpctrain.checkpoint.exchange.source import open_model, source_shape
from hpctrain.checkpoint.read import load
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.part import parameter_list
from hpctrain.model.transformer import Transformer
from hpctrain.objective.next_token import CrossEntropy
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.sharding.reducer import ExactReduction, Reducer
from hpctrain.sharding.replica_sync import SyncEveryStep
from hpctrain.sharding.replication import Replications
from hpctrain.sharding.synchronize import GradientSynchronizer
from tests.checkpoint.exchange.test_families import SEQUENCE, USUAL, VOCABULARY, distance
from tests.checkpoint.exchange.test_hugging_face import assert_same_bits, no_warnings, tensors_of
from tests.engines import make_buckets

transformers = pytest.importorskip("transformers")

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
    "qwen2-moe": ("Qwen2Moe", QWEN2_MOE),
    "qwen2-moe-listed": (
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
}
"""Class of `transformers` and keys of its config, by the name of a case."""


def reference(name: str, **changes: Any) -> torch.nn.Module:
    """Return a model of `transformers` whose parameters are all rough."""
    kind, keys = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**{**USUAL, **keys, **changes})
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def own_tensors(model: torch.nn.Module, folder: Path) -> dict[str, Tensor]:
    """Return the parameters of a model of `transformers` by our names, as they are read from its files."""
    model.save_pretrained(folder)
    files = open_model(folder)
    return {
        dataset.removeprefix("/model/"): files.read(dataset, (0,) * len(shape), shape)
        for dataset, shape in files.shapes.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_transformers(name: str, world: World, tmp_path: Path) -> None:
    theirs = reference(name)
    theirs.save_pretrained(tmp_path / "theirs")
    import_model(world, tmp_path / "theirs", tmp_path / "model.h5")
    shape = replace(source_shape(tmp_path / "model.h5"), balance="none", balance_loss=0.0)
    lone = world.single_rank_world()
    mesh = Mesh(lone, {})
    model = Transformer(shape, LayerContext(tensor=mesh.group("tensor"), context=mesh.group("context")))
    buckets = make_buckets(model.units(), Replications.unsharded(mesh), torch.float32, 10_000)
    load(tmp_path / "model.h5", lone.everyone, model_entries(buckets))
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
        assert distance(parameter.gradient, expected.pop(parameter.shard.name)) < 1e-5, parameter.shard.name
    assert not expected


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


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit = 5.0: unsupported; expected 7.0 for gpt_oss"),
        ({"quantization_config": {"quant_method": "awq"}}, "expected None or quant_method = 'mxfp4'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': unsupported; expected 'silu' for gpt_oss"),
    ],
)
def test_configs_of_gpt_oss_that_are_refused(keys: dict[str, Any], problem: str) -> None:
    config = {**USUAL, **GPT_OSS, "architectures": ["GptOssForCausalLM"], **keys}
    with pytest.raises(HpctrainError) as caught:
        shape_of(config, "config.json")
    assert any(problem in each for each in caught.value.problems), caught.value.problems


def test_positions_of_gpt_oss_are_scaled_unless_a_config_says_otherwise() -> None:
    shape = shape_of({"architectures": ["GptOssForCausalLM"]}, "config.json")
    assert shape.rope_scaling is not None
    assert (shape.rope_scaling.kind, shape.rope_scaling.factor, shape.rope_base) == ("yarn", 32.0, 150_000.0)
    assert (shape.windows, shape.experts, shape.hidden) == ((128, 0), 128, 2880)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"shared_expert_intermediate_size": 50},
            "shared_expert_intermediate_size = 50: must be a multiple of moe_intermediate_size = 20",
        ),
        ({"mlp_only_layers": "1"}, "mlp_only_layers = '1': must be a list of numbers of layers"),
        ({"mlp_only_layers": [0, 1, 2]}, "mlp_only_layers = [0, 1, 2]: leaves no layer with experts"),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "quantization_config = {'quant_method': 'mxfp4'}",
        ),
        ({"use_sliding_window": True}, "use_sliding_window = True: unsupported"),
        ({"hidden_act": "mish"}, "hidden_act = 'mish': unsupported"),
    ],
)
def test_configs_that_are_refused(keys: dict[str, Any], problem: str) -> None:
    config = {**USUAL, **QWEN2_MOE, "architectures": ["Qwen2MoeForCausalLM"], **keys}
    with pytest.raises(HpctrainError) as caught:
        shape_of(config, "config.json")
    assert caught.value.exit_code == 2
    assert any(problem in each for each in caught.value.problems), caught.value.problems
