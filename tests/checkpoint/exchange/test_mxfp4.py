"""Weights in 4 bits, read as `transformers` reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpctrain.checkpoint.exchange.convert import import_model
from hpctrain.checkpoint.exchange.mxfp4 import Mxfp4Folder, dequantize
from hpctrain.checkpoint.exchange.safetensors_folder import open_folder
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.model.part import logits_of
from tests.checkpoint.exchange.test_families import reference
from tests.checkpoint.exchange.test_mixtures import our_model

mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
safetensors = pytest.importorskip("safetensors.torch")

SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 8}


def random_blocks(*shape: int) -> dict[str, Tensor]:
    """Return blocks of random bytes, and scales that give elements of usual sizes."""
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 126, shape, dtype=torch.uint8, generator=generator)
    return {"blocks": blocks, "scales": scales}


def quantized_folder(folder: Path) -> dict[str, Tensor]:
    """Write a gpt-oss whose experts are in 4 bits, and return their weights as `transformers` reads them."""
    reference("gpt-oss", **SIZES).save_pretrained(folder)
    tensors = safetensors.load_file(folder / "model.safetensors")
    experts: dict[str, Tensor] = {}
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        parts = random_blocks(count, outputs, inputs // 32)
        tensors |= {f"{name}_{kind}": part for kind, part in parts.items()}
        experts[name] = mxfp4.convert_moe_packed_tensors(parts["blocks"], parts["scales"])
    safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return experts


def test_elements_are_those_of_transformers() -> None:
    blocks, scales = random_blocks(3, 5, 4).values()
    scales[0, 0] = torch.tensor([1, 60, 200, 250])
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(dequantize(blocks, scales).transpose(1, 2), expected)


def test_boxes_are_those_of_the_matrix(tmp_path: Path) -> None:
    experts = quantized_folder(tmp_path / "theirs")
    folder = Mxfp4Folder(open_folder(tmp_path / "theirs"))
    for name, whole in experts.items():
        assert folder.tensors[name].shape == tuple(whole.shape)
        for start, shape in (
            ((0, 0, 0), tuple(whole.shape)),
            ((1, 5, 3), (2, 20, 7)),
            ((4, 31, 0), (1, 1, 9)),
        ):
            box = tuple(slice(first, first + extent) for first, extent in zip(start, shape, strict=True))
            assert torch.equal(folder.read_finite(name, start, shape), whole[box])


def test_a_model_in_4_bits_is_imported(world: World, tmp_path: Path) -> None:
    experts = quantized_folder(tmp_path / "theirs")
    model = reference("gpt-oss", **SIZES)
    with torch.no_grad():
        for name, weight in experts.items():
            model.get_parameter(name).copy_(weight)
    import_model(world, tmp_path / "theirs", tmp_path / "model.h5")
    tokens = torch.arange(24).unsqueeze(0)
    with torch.no_grad():
        expected = model(tokens).logits
        logits = logits_of(our_model(tmp_path / "model.h5", world), tokens)
    assert (logits - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda parts: parts.pop("scales"),
            "down_proj_blocks: requires model.layers.0.mlp.experts.down_proj",
        ),
        (
            lambda parts: parts.update(blocks=parts["blocks"][..., :8].contiguous()),
            "down_proj_blocks: has shape [5, 64, 1, 8], expected [5, 64, 1, 16] for its scales",
        ),
        (
            lambda parts: parts.update(scales=parts["scales"].float()),
            "down_proj_blocks: must be bytes [experts, outputs, blocks, 16] with scales",
        ),
    ],
)
def test_blocks_that_do_not_fit_their_scales_are_refused(
    change: object, problem: str, tmp_path: Path
) -> None:
    quantized_folder(tmp_path / "theirs")
    file, name = tmp_path / "theirs" / "model.safetensors", "model.layers.0.mlp.experts.down_proj"
    tensors = safetensors.load_file(file)
    parts = {kind: tensors.pop(f"{name}_{kind}") for kind in ("blocks", "scales")}
    assert callable(change)
    change(parts)
    tensors |= {f"{name}_{kind}": part for kind, part in parts.items()}
    safetensors.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(HpctrainError) as caught:
        Mxfp4Folder(open_folder(tmp_path / "theirs"))
    assert caught.value.exit_code == 2
    assert problem in str(caught.value)
