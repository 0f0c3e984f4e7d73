"""Quantized weights in Hugging Face folders: which of them can be read, and reading them as bf16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpctrain.checkpoint.exchange.fp8_blocks import SCALES, Fp8Folder
from hpctrain.checkpoint.exchange.mxfp4 import Mxfp4Folder
from hpctrain.checkpoint.exchange.safetensors_folder import CONFIG, TensorFolder
from hpctrain.deck.family import MXFP4
from hpctrain.errors import HpctrainError
from hpctrain.text import counted, either

_TABLE = "quantization_config"
_FP8 = "fp8"
_SUPPORTED: Mapping[str, tuple[str, ...]] = {
    "fmt": ("e4m3",),
    "activation_scheme": ("dynamic",),
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": (_FP8,),
}
"""Supported values of the keys of a `quantization_config` of weights in fp8. The first one is the default."""


def quantization_problems(config: Mapping[str, Any], method: str) -> Iterator[tuple[str, object, str]]:
    """Yield the keys of a config.json whose quantization is not supported, each with its value and a message.

    Args:
        config: Content of the config.json.
        method: `quant_method` that the architecture supports beside fp8; "" for none.
    """
    table = config.get(_TABLE)
    if table is None:
        return
    methods = [name for name in (_FP8, method) if name]
    found = table.get("quant_method") if isinstance(table, Mapping) else None
    if found not in methods:
        yield _TABLE, table, f"unsupported; expected None or quant_method = {either(map(repr, methods))}"
    elif found == _FP8:
        for key, supported in _SUPPORTED.items():
            if (value := table.get(key, supported[0])) not in supported:
                yield f"{_TABLE}: {key}", value, f"unsupported; expected {either(map(repr, supported))}"
        if _block_size(table) is None:
            message = "must be a list of two sizes of blocks (other scales are unsupported)"
            yield f"{_TABLE}: weight_block_size", table.get("weight_block_size"), message


def dequantized(folder: TensorFolder, config: Mapping[str, Any], method: str) -> TensorFolder:
    """Return a folder whose quantized weights, if it has any, are read as bf16.

    Args:
        folder: The folder.
        config: Its config.json, which has no `quantization_problems`.
        method: `quant_method` that the architecture supports beside fp8; "" for none.

    Raises:
        HpctrainError: Scales are missing or do not fit their weights, or only config.json or only the tensors
            say that weights are in 8 bits.
    """
    table = config.get(_TABLE) or {}
    in_8_bits = [name for name, each in folder.tensors.items() if each.kind.startswith("F8_")]
    if table.get("quant_method") == _FP8 and (size := _block_size(table)) is not None:
        if not in_8_bits and not any(name.endswith(SCALES) for name in folder.tensors):
            # transformers reads such files as plain weights on CPUs; on GPUs it misses their scales.
            raise HpctrainError(
                f"{folder.path / CONFIG}: {_TABLE}: quant_method = {_FP8!r}: no tensor of these files is in "
                "8 bits; remove the key if their weights are not quantized"
            )
        return Fp8Folder(folder, size)
    if in_8_bits:
        example = f"{in_8_bits[0]} in {folder.tensors[in_8_bits[0]].file}"
        raise HpctrainError(
            f"{folder.path / CONFIG}: {_TABLE} is missing, but {counted(len(in_8_bits), 'tensor')} such as "
            f"{example} are in 8 bits; their scales are read only with quant_method = {_FP8!r}"
        )
    return Mxfp4Folder(folder) if method == MXFP4 else folder


def _block_size(table: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns of a block with a common scale; None for other scales."""
    match table.get("weight_block_size"):
        case [int(rows), int(columns)] if min(rows, columns) > 0 and bool not in map(type, (rows, columns)):
            return rows, columns
        case _:
            return None
