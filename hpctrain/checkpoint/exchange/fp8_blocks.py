"""Weights in 8 bits (float8_e4m3fn) with a scale for each block, as DeepSeek-V3 is published, read as bf16.

The scales of a matrix `NAME` are the tensor `NAME_scale_inv` with an element for each block, usually of 128 x
128 elements. An element of the matrix is its 8-bit number times the scale of its block. Blocks at the last
rows and columns may be incomplete. Matrices may have further dims in front, such as one for experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.checkpoint.agree import first_difference
from hpctrain.checkpoint.exchange.safetensors_folder import CONFIG, TYPES, Index, TensorFolder, TensorInfo
from hpctrain.errors import HpctrainError
from hpctrain.text import either

SCALES = "_scale_inv"
_KIND = "F8_E4M3"


def dequantize(values: Tensor, scales: Tensor, block: Index, first: Index) -> Tensor:
    """Return 8-bit numbers times the scales of their blocks, rounded to bf16.

    Args:
        values: Numbers in 8 bits.
        scales: Scales of the blocks in which they lie, with as many dims.
        block: Extent of a block in each dim.
        first: Index of the first number in its block.
    """
    for dim, (size, offset) in enumerate(zip(block, first, strict=True)):
        scales = scales.index_select(dim, (torch.arange(values.shape[dim]) + offset) // size)
    return (values.float() * scales.float()).bfloat16()


class Fp8Folder(TensorFolder):
    """Tensors of a folder, in which matrices in 8 bits are tensors of bf16.

    Args:
        folder: The folder, some of whose tensors are in 8 bits.
        block: Rows and columns of a block with a common scale.

    Raises:
        HpctrainError: A matrix in 8 bits has no scales, or scales that do not fit it.
    """

    def __init__(self, folder: TensorFolder, block: tuple[int, int]) -> None:
        tensors = dict(folder.tensors)
        self._block = block
        self._quantized = frozenset(name for name, each in tensors.items() if each.kind == _KIND)
        matrices = sorted(self._quantized)
        misfits = {name: text for name in matrices if (text := self._shape_problem(name, tensors))}
        if len(misfits) > 1:  # the same mistake everywhere is one of the block size
            key = f"{folder.path / CONFIG}: quantization_config: weight_block_size = {list(block)}"
            name, text = next(iter(misfits.items()))
            example = f"{name} in {tensors[name].file} {text}"
            raise HpctrainError(f"{key}: contradicts the scales in these files, since {example}")
        problems = [
            f"{folder.path / tensors[name].file}: {name}: {text}"
            for name in matrices
            if (text := misfits.get(name) or self._problem(name, tensors))
        ]
        if problems:
            raise first_difference(problems)
        for name in self._quantized:
            tensors[name] = replace(tensors[name], kind="BF16")
            del tensors[name + SCALES]
        super().__init__(folder.path, tensors)
        # One for each kind of tensors, since a folder keeps the file of its last tensor open.
        self._numbers, self._scales = (TensorFolder(folder.path, folder.tensors) for _ in range(2))

    def _shape_problem(self, name: str, tensors: Mapping[str, TensorInfo]) -> str | None:
        """Return a message if the scales of a matrix do not have one element for each block; else None."""
        matrix, scales = tensors[name], tensors.get(name + SCALES)
        if scales is None or len(matrix.shape) < len(self._block):
            return None
        blocks = [-(-n // size) for n, size in zip(matrix.shape, self._blocks(matrix.shape), strict=True)]
        message = f"has scales of shape {list(scales.shape)}, expected {blocks} for its blocks"
        return message if list(scales.shape) != blocks else None

    def _problem(self, name: str, tensors: Mapping[str, TensorInfo]) -> str | None:
        """Return a message if scales are missing or have a wrong type, or if a matrix has too few dims."""
        matrix, scales = tensors[name], tensors.get(name + SCALES)
        if scales is None:
            return f"requires {name}{SCALES}, which is not in these files"
        if len(matrix.shape) < len(self._block):
            return f"has shape {list(matrix.shape)}, expected a matrix of scaled blocks"
        return None if scales.kind in TYPES else f"has scales of type {scales.kind}, expected {either(TYPES)}"

    def _blocks(self, shape: Index) -> Index:
        """Return the extent of a block in each dim of a tensor."""
        return (*(1 for _ in shape[len(self._block) :]), *self._block)

    @override
    def read(self, name: str, start: Index, shape: Index) -> Tensor:
        if name not in self._quantized:
            return super().read(name, start, shape)
        block = self._blocks(shape)
        at = tuple(first // size for first, size in zip(start, block, strict=True))
        last = (-(-(first + extent) // size) for first, extent, size in zip(start, shape, block, strict=True))
        counts = tuple(end - first for first, end in zip(at, last, strict=True))
        within = tuple(first % size for first, size in zip(start, block, strict=True))
        scales = self._scales.read(name + SCALES, at, counts)
        return dequantize(self._numbers.read(name, start, shape), scales, block, within)
