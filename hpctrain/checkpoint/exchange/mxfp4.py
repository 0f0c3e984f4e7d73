"""Weights of experts in 4 bits (MXFP4), as gpt-oss is published, read as 16-bit numbers.

A block of 32 elements is 16 bytes with two elements each, the first one in the lower bits, and one byte for
their common scale, a power of two. An element has a sign, two bits of exponent and one of mantissa (e2m1). A
matrix `NAME` of all experts is two tensors: `NAME_blocks` [experts, outputs, inputs / 32, 16] and
`NAME_scales` [experts, outputs, inputs / 32].
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.checkpoint.exchange.safetensors_folder import Index, TensorFolder
from hpctrain.errors import HpctrainError

BLOCKS, SCALES = "_blocks", "_scales"
_ELEMENTS, _BYTES, _BIAS = 32, 16, 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-each for each in _MAGNITUDES))


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the bf16 elements [..., 32 n] of blocks uint8 [..., n, 16] with their scales uint8 [..., n]."""
    both = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    values = torch.tensor(_VALUES)[both.int()]
    return torch.ldexp(values, scales.unsqueeze(-1).int() - _BIAS).flatten(-2).bfloat16()


class Mxfp4Folder(TensorFolder):
    """Tensors of a folder, in which matrices in 4 bits are tensors [experts, inputs, outputs] of bf16.

    Args:
        folder: The folder, which may have no such matrices.

    Raises:
        HpctrainError: Blocks and scales of a matrix do not fit each other.
    """

    def __init__(self, folder: TensorFolder) -> None:
        tensors = dict(folder.tensors)
        names = [name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)]
        self._quantized = frozenset(names)
        for name in names:
            blocks, scales = tensors.pop(name + BLOCKS), tensors.pop(name + SCALES, None)
            place = f"{folder.path / blocks.file}: {name}{BLOCKS}"
            if scales is None:
                raise HpctrainError(f"{place}: requires {name}{SCALES}, which is not in these files")
            *rows, count = blocks.shape
            if blocks.kind != "U8" or scales.kind != "U8" or len(rows) != len(("expert", "row", "block")):
                raise HpctrainError(
                    f"{place}: must be bytes [experts, outputs, blocks, {_BYTES}] with scales"
                )
            if count != _BYTES or tuple(rows) != scales.shape:
                problem = f"has shape {list(blocks.shape)}, expected {[*scales.shape, _BYTES]} for its scales"
                raise HpctrainError(f"{place}: {problem}")
            shape = (rows[0], rows[2] * _ELEMENTS, rows[1])
            tensors[name] = replace(blocks, kind="BF16", shape=shape)
        super().__init__(folder.path, tensors)
        # One for each kind of tensors, since a folder keeps the file of its last tensor open.
        self._blocks, self._scales = (TensorFolder(folder.path, folder.tensors) for _ in range(2))

    @override
    def read(self, name: str, start: Index, shape: Index) -> Tensor:
        if name not in self._quantized:
            return super().read(name, start, shape)
        first = start[1] // _ELEMENTS
        count = -(-(start[1] + shape[1]) // _ELEMENTS) - first
        at, extent = (start[0], start[2], first), (shape[0], shape[2], count)
        blocks = self._blocks.read(name + BLOCKS, (*at, 0), (*extent, _BYTES))
        values = dequantize(blocks, self._scales.read(name + SCALES, at, extent))
        within = start[1] - first * _ELEMENTS
        return values[..., within : within + shape[1]].transpose(1, 2)
