"""Adapters against plain torch: gradients through the model of `transformers`, and its logits when merged.

Tests of checkpoint/exchange/peft.py too; with the library itself where it is there.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import h5py
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.checkpoint.exchange.convert import export_model
from hpctrain.checkpoint.exchange.peft import export_adapters
from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.state_entries import training_entries
from hpctrain.checkpoint.stored_deck import deck_state
from hpctrain.checkpoint.stored_tokenizer import tokenizer_state
from hpctrain.comm.world import World
from hpctrain.data.batches import MASKED
from hpctrain.data.tokenizer_settings import TokenizerSettings
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.generate.generation_model import load
from tests.engines import LLAMA, small_deck, trainer

transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file

FAMILIES = {"gpt2": (), "llama": LLAMA}
ADAPTERS = ("model.adapters.rank=3", "model.adapters.alpha=5", "optimizer.clip=0", "batch.micro_size=8")
SCALE = 5 / 3
TOKENS = torch.randint(0, 61, (2, 32), generator=torch.Generator().manual_seed(1))
THEIRS = {
    "gpt2": {
        "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
        "attn.c_proj": ("attention.output",),
        "mlp.c_fc": ("feed_forward.up",),
        "mlp.c_proj": ("feed_forward.down",),
    },
    "llama": {
        "self_attn.q_proj": ("attention.query",),
        "self_attn.k_proj": ("attention.key",),
        "self_attn.v_proj": ("attention.value",),
        "self_attn.o_proj": ("attention.output",),
        "mlp.gate_proj": ("feed_forward.gate",),
        "mlp.up_proj": ("feed_forward.up",),
        "mlp.down_proj": ("feed_forward.down",),
    },
}
BLOCKS = {"gpt2": "transformer.h", "llama": "model.layers"}


def adapted(family: str, factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is added to each weight of theirs."""
    found = {}
    for block in range(2):
        for theirs, ours in THEIRS[family].items():
            names = [f"blocks.{block}.{each}.adapter" for each in ours]
            parts = [SCALE * factors[f"{name}.b"] @ factors[f"{name}.a"] for name in names]
            whole = torch.cat(parts)
            name = f"{BLOCKS[family]}.{block}.{theirs}.weight"
            found[name] = whole.t() if family == "gpt2" else whole
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_plain_torch_and_exports_merged(
    world: World, tmp_path: Path, family: str
) -> None:
    lone = world.single_rank_world()
    base, run = (trainer(lone, small_deck(*FAMILIES[family], *more)) for more in ((), ADAPTERS))
    save(tmp_path / "base.h5", lone.everyone, training_entries(base.engine.state()), deck_state(base.deck))
    export_model(lone, tmp_path / "base.h5", tmp_path / "base", "fp32", 1 << 30)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").train(False)

    factors = {n: v.clone().requires_grad_() for n, v in run.parameters().items() if ".adapter." in n}
    assert len(factors) == 2 * 2 * len([n for names in THEIRS[family].values() for n in names])
    assert all(bool(values.any()) for values in factors.values())
    step, size = run.step, run.deck.batch.global_size
    (micro,) = step.batches.step(run.state.samples, size, 0, 1, step.micro_size)
    frozen = {name: value.detach() for name, value in theirs.state_dict().items()}
    weights = {name: frozen[name] + more for name, more in adapted(family, factors).items()}
    tokens, targets = micro.tokens, micro.targets
    logits = torch.func.functional_call(theirs, weights, (tokens,), {"use_cache": False}).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=MASKED)
    loss.backward()
    (result,) = run.train(1)
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    found = run.gradients()
    assert found.keys() == factors.keys()
    for name, factor in factors.items():
        assert factor.grad is not None
        error = (found[name] - factor.grad).abs().max() / factor.grad.abs().max()
        assert error < 1e-5, name

    path = tmp_path / "run.h5"
    save(path, lone.everyone, training_entries(run.engine.state()), deck_state(run.deck))
    export_model(lone, path, tmp_path / "merged", "fp32", 1 << 30)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    expected, ours = merged(tokens).logits.detach(), load(path, device="cpu").logits(tokens)
    assert torch.allclose(ours, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    after = {n: v for n, v in run.parameters().items() if ".adapter." in n}
    for name, more in adapted(family, after).items():
        assert torch.allclose(merged.state_dict()[name], frozen[name] + more, rtol=0, atol=1e-6), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", ['["*"]', '["value", "blocks.1.feed_forward.up"]'])
def test_adapters_alone_are_those_of_peft(world: World, tmp_path: Path, family: str, targets: str) -> None:
    lone, keys = world.single_rank_world(), (*ADAPTERS, f"model.adapters.targets={targets}")
    base, run = (trainer(lone, small_deck(*FAMILIES[family], *more)) for more in ((), keys))
    for each, name in ((base, "base"), (run, "run")):
        path = tmp_path / f"{name}.h5"
        save(path, lone.everyone, training_entries(each.engine.state()), deck_state(each.deck))
    export_model(lone, tmp_path / "base.h5", tmp_path / "base", "fp32", 1 << 30)
    told = export_adapters(lone, tmp_path / "run.h5", tmp_path / "alone", str(tmp_path / "base"))
    config = json.loads((tmp_path / "alone/adapter_config.json").read_text())
    tensors = load_file(tmp_path / "alone/adapter_model.safetensors")
    count = len(config["target_modules"])
    assert f"{count} adapters" in told and len(tensors) == 2 * count
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    weights = model.state_dict()
    for name in config["target_modules"]:
        a, b = (tensors[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
        rank = config["rank_pattern"].get(name, config["r"])
        alpha = config["alpha_pattern"].get(name, config["lora_alpha"])
        assert (len(a), alpha / rank) == (rank, pytest.approx(SCALE))
        more = alpha / rank * b @ a
        weights[f"{name}.weight"] += more.t() if config["fan_in_fan_out"] else more
    ours = load(tmp_path / "run.h5", device="cpu").logits(TOKENS)
    expected = model(TOKENS).logits.detach()
    assert torch.allclose(ours, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    if find_spec("peft") is not None:
        from peft import PeftModel

        fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        theirs = PeftModel.from_pretrained(fresh, tmp_path / "alone").eval()(TOKENS).logits.detach()
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-5 * float(expected.abs().max()))
    with pytest.raises(HpctrainError, match=r"base\.h5: has no adapters"):
        export_adapters(lone, tmp_path / "base.h5", tmp_path / "none", "x")


def test_names_of_tensors_are_those_of_the_imported_architecture(world: World, tmp_path: Path) -> None:
    """Phi-3 of this shape computes what Llama does, with queries, keys and values in one layer."""
    lone = world.single_rank_world()
    settings = TokenizerSettings(files={"config.json": {"model_type": "phi3"}})
    run = trainer(lone, small_deck(*LLAMA, *ADAPTERS, 'model.adapters.targets=["value"]'))
    state = {**deck_state(run.deck), **tokenizer_state(None, settings)}
    save(tmp_path / "run.h5", lone.everyone, training_entries(run.engine.state()), state)
    export_model(lone, tmp_path / "run.h5", tmp_path / "merged", "fp32", 1 << 30)
    assert json.loads((tmp_path / "merged/config.json").read_text())["model_type"] == "phi3"
    assert "model.layers.1.self_attn.qkv_proj.weight" in load_file(tmp_path / "merged/model.safetensors")
    export_adapters(lone, tmp_path / "run.h5", tmp_path / "alone", str(tmp_path / "merged"))
    targets = json.loads((tmp_path / "alone/adapter_config.json").read_text())["target_modules"]
    assert targets == [f"model.layers.{block}.self_attn.qkv_proj" for block in range(2)]


def test_damaged_adapters_are_not_merged(world: World, tmp_path: Path) -> None:
    lone, path = world.single_rank_world(), tmp_path / "run.h5"
    run = trainer(lone, small_deck(*ADAPTERS))
    save(path, lone.everyone, training_entries(run.engine.state()), deck_state(run.deck))
    with h5py.File(path) as file:
        offset = file["model/blocks.1.feed_forward.up.adapter.b"].id.get_offset()
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputOutputError, match=r"up\.adapter\.b is damaged: elements 0 to"):
        export_model(lone, path, tmp_path / "merged", "fp32", 1 << 30)
    assert not (tmp_path / "merged").exists()
