"""Weights in 8 bits with scales of blocks, read as `transformers` computes them.

Tests of checkpoint/exchange/fp8_blocks.py and quantization.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.checkpoint.exchange.convert import export_model, import_model
from hpctrain.checkpoint.exchange.fp8_blocks import Fp8Folder, dequantize
from hpctrain.checkpoint.exchange.hugging_face.config_reader import shape_of
from hpctrain.checkpoint.exchange.safetensors_folder import open_folder
from hpctrain.checkpoint.exchange.source import open_model
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError, InputOutputError
from tests.checkpoint.exchange.test_families import LATENT, USUAL, reference
from tests.checkpoint.exchange.test_hugging_face import assert_same_bits, tensors_of

fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
safetensors = pytest.importorskip("safetensors.torch")

BLOCK = (16, 10)
TABLE: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
    "modules_to_not_convert": ["lm_head", "model.layers.1.self_attn.o_proj"],
}
DOWN = "model.layers.0.mlp.down_proj.weight"


def random_blocks(
    shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return numbers in 8 bits, and scales that give elements of usual sizes."""
    numbers = (torch.randn(shape) * 100).to(torch.float8_e4m3fn)
    blocks = [-(-extent // size) for extent, size in zip(shape[-2:], block, strict=True)]
    return numbers, (0.0002 + 0.002 * torch.rand(*shape[:-2], *blocks)).to(dtype)


def quantized_folder(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Write a model with weights in 8 bits in several files, and return all as `transformers` reads them."""
    reference(name).save_pretrained(folder, max_shard_size="20KB")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": TABLE}))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    expected: dict[str, Tensor] = {}
    for number, file in enumerate(sorted(folder.glob("*.safetensors"))):
        tensors, scales = safetensors.load_file(file), {}
        expected |= tensors
        for each, weight in list(tensors.items()):
            kept = any(
                skipped in each for skipped in (*TABLE["modules_to_not_convert"], "embed", "mlp.gate.")
            )
            if weight.dim() > 1 and not kept:
                tensors[each], scale = random_blocks(tuple(weight.shape), BLOCK, dtype)
                scales[f"{each}_scale_inv"] = scale
                exact = fp8._dequantize_fp8_weight(tensors[each], scale, BLOCK, torch.float32)
                expected[each] = exact.bfloat16()
        scales_file = f"scales-{number}.safetensors"
        safetensors.save_file(tensors, file, metadata={"format": "pt"})
        safetensors.save_file(scales, folder / scales_file, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(scales, scales_file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return expected


@pytest.mark.parametrize("shape", [(256, 384), (129, 200), (3, 1), (2, 130, 257)])
def test_elements_are_those_of_transformers(shape: tuple[int, ...]) -> None:
    numbers, scales = random_blocks(shape, (128, 128), torch.float32)
    expected = fp8._dequantize_fp8_weight(numbers, scales, [128, 128], torch.float32).bfloat16()
    block = (*(1 for _ in shape[2:]), 128, 128)
    assert torch.equal(dequantize(numbers, scales, block, (0,) * len(shape)), expected)


def test_boxes_are_those_of_the_matrix(tmp_path: Path) -> None:
    expected = quantized_folder(tmp_path, "deepseek-v3")
    folder = Fp8Folder(open_folder(tmp_path), BLOCK)
    assert folder.tensors.keys() == expected.keys()
    for name in (DOWN, "model.layers.1.self_attn.kv_b_proj.weight", "model.layers.1.self_attn.o_proj.weight"):
        rows, columns = shape = tuple(expected[name].shape)
        assert folder.tensors[name].shape == shape
        for start in ((0, 0), (15, 9), (16, 10), (17, 21)):
            for extent in ((1, 1), (2, 3), (rows - start[0], columns - start[1])):
                box = tuple(slice(at, at + count) for at, count in zip(start, extent, strict=True))
                assert torch.equal(folder.read_finite(name, start, extent), expected[name][box])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("deepseek-v3", torch.float32),
        ("llama-qwen3", torch.bfloat16),
        ("phi3", torch.float32),
        ("granite-moe", torch.float32),
    ],
)
def test_a_model_in_8_bits_is_imported(name: str, dtype: torch.dtype, world: World, tmp_path: Path) -> None:
    expected = quantized_folder(tmp_path / "theirs", name, dtype)
    import_model(world, tmp_path / "theirs", tmp_path / "model.h5")
    export_model(world, tmp_path / "model.h5", tmp_path / "ours", "bf16", 10**9)
    exported = tensors_of(tmp_path / "ours")
    wanted = {each: weight.to(exported[each].dtype) for each, weight in expected.items()}
    assert_same_bits(exported, wanted)
    assert "quantization_config" not in json.loads((tmp_path / "ours" / "config.json").read_text())

    model = open_model(tmp_path / "theirs")
    for dataset, shape in model.shapes.items():
        whole = model.read(dataset, (0,) * len(shape), shape)
        for dim in (0, len(shape) - 1):  # what tensor ranks read
            cut = -(-shape[dim] // 3)
            parts = [
                model.read(
                    dataset,
                    tuple(first if each == dim else 0 for each in range(len(shape))),
                    tuple(min(cut, n - first) if each == dim else n for each, n in enumerate(shape)),
                )
                for first in range(0, shape[dim], cut)
            ]
            assert torch.equal(torch.cat(parts, dim), whole), (dataset, dim)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda _, scales: scales.clear(), f"requires {DOWN}_scale_inv, which is not in these files"),
        (
            lambda parts, _: parts.update({DOWN: parts[DOWN].float()}),
            f"{DOWN}_scale_inv: in this file, but not in the model of config.json",
        ),
        (
            lambda _, scales: scales.update({f"{DOWN}_scale_inv": torch.ones(())}),
            f"{DOWN}: has scales of shape [], expected [3, 5] for its blocks",
        ),
        (
            lambda _, scales: scales.update({f"{DOWN}_scale_inv": torch.ones(3, 5, dtype=torch.int32)}),
            f"{DOWN}: has scales of type I32, expected F32, BF16 or F16",
        ),
        (
            lambda parts, _: parts.update({DOWN: parts[DOWN].flatten()}),
            f"{DOWN}: has shape [1584], expected a matrix of scaled blocks",
        ),
        (
            lambda parts, _: parts.update({DOWN: parts[DOWN].float().to(torch.float8_e5m2)}),
            f"{DOWN}: has type F8_E5M2, expected F32, BF16 or F16",
        ),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    change: Callable[[dict[str, Tensor], dict[str, Tensor]], None], problem: str, tmp_path: Path
) -> None:
    reference("deepseek-v3").save_pretrained(tmp_path)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    tensors[DOWN], scale = random_blocks(tuple(tensors[DOWN].shape), BLOCK, torch.float32)
    scales = {f"{DOWN}_scale_inv": scale}
    change(tensors, scales)
    safetensors.save_file(tensors | scales, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": TABLE}))
    with pytest.raises(HpctrainError) as caught:
        open_model(tmp_path)
    assert caught.value.exit_code == 2
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (None, "config.json: quantization_config is missing, but "),
        (
            TABLE | {"weight_block_size": [BLOCK[0] + 1, BLOCK[1]]},
            f"quantization_config: weight_block_size = [{BLOCK[0] + 1}, {BLOCK[1]}]: contradicts the scales",
        ),
    ],
)
def test_a_config_that_describes_other_scales_is_refused_by_its_key(
    table: dict[str, Any] | None, problem: str, tmp_path: Path
) -> None:
    quantized_folder(tmp_path, "deepseek-v3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": table}))
    with pytest.raises(HpctrainError) as caught:
        open_model(tmp_path)
    (sentence,) = caught.value.problems
    assert caught.value.exit_code == 2 and problem in sentence, sentence


def test_a_config_that_describes_8_bits_over_plain_weights_is_refused(tmp_path: Path) -> None:
    reference("deepseek-v3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": TABLE}))
    with pytest.raises(HpctrainError) as caught:
        open_model(tmp_path)
    (sentence,) = caught.value.problems
    assert caught.value.exit_code == 2
    assert "quantization_config: quant_method = 'fp8': no tensor of these files is in 8 bits" in sentence


def test_a_number_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    quantized_folder(tmp_path, "deepseek-v3")
    (file,) = (each for each in tmp_path.glob("model-*") if DOWN in safetensors.load_file(each))
    tensors = safetensors.load_file(file)
    tensors[DOWN][17, 3] = float("nan")
    safetensors.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputOutputError, match=r"down_proj\.weight is nan at \[17, 3\]"):
        open_model(tmp_path).read("/model/blocks.0.feed_forward.down.weight", (0, 0), (36, 44))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"quant_method": "awq"}, "unsupported; expected None or quant_method = 'fp8'"),
        ({"fmt": "e5m2"}, "quantization_config: fmt = 'e5m2': unsupported; expected 'e4m3'"),
        ({"activation_scheme": "static"}, "activation_scheme = 'static': unsupported; expected 'dynamic'"),
        ({"scale_fmt": "int"}, "scale_fmt = 'int': unsupported; expected 'float' or 'ue8m0'"),
        ({"expert_dtype": "fp4"}, "expert_dtype = 'fp4': unsupported; expected 'fp8'"),
        ({"weight_block_size": None}, "weight_block_size = None: must be a list of two sizes of blocks"),
        ({"weight_block_size": [128]}, "weight_block_size = [128]: must be a list of two sizes of blocks"),
        ({"weight_block_size": [0, 128]}, "weight_block_size = [0, 128]: must be a list of two sizes"),
        ({"weight_block_size": [True, True]}, "weight_block_size = [True, True]: must be a list of two"),
    ],
)
def test_other_quantizations_are_refused(changes: dict[str, Any], problem: str) -> None:
    config = {**USUAL, **LATENT, "rope_parameters": None, "architectures": ["DeepseekV3ForCausalLM"]}
    assert shape_of({**config, "quantization_config": TABLE}, "config.json").hidden == USUAL["hidden_size"]
    with pytest.raises(HpctrainError) as caught:
        shape_of({**config, "quantization_config": {**TABLE, **changes}}, "config.json")
    assert caught.value.exit_code == 2
    (told,) = caught.value.problems
    assert problem in told
