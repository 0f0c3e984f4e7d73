"""The products of a layer's matrix: forward, input gradient, weight gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.parallel.groups import LayerGroups
from hpctrain.parallel.saved import Saving
from hpctrain.parallel.shard import Parameter

PRODUCT_ELEMENTS = 1 << 23
"""Of a product in another format than the sum to which it is added; a larger one comes in pieces."""

BLOCK_ROWS = 2048
"""Rows of a table that the CPU multiplies by at a time."""


class Product:
    """Y = X W^T with fused weights W [n, k], which lie behind each other in one Bucket, multiplied as stored.

    One for each layer, so that what a format needs to remember of its matrix has a place; it is made with
    the first of the weights. What it sees in the passes of a step goes into the `noted` of its groups.
    """

    def __init__(self, weights: Sequence[Parameter], groups: LayerGroups) -> None:
        self.weights, self.groups = weights, groups

    def weight(self) -> Tensor:
        """All weights as one matrix [n, k]."""
        return joined([parameter.detach() for parameter in self.weights])

    def forward(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., k] -> [..., n], with a bias [n] added."""
        return functional.linear(inputs, self.weight(), bias)

    def logits(self, inputs: Tensor) -> Tensor:
        """As `forward`, of [r, k] and a table of many rows.

        In fp32 on the CPU block by block of the table, which takes two thirds of the time of one product: the
        library packs all of a transposed table before it multiplies.
        """
        table = self.weight()
        if not inputs.is_cpu or inputs.dtype != torch.float32 or len(table) <= BLOCK_ROWS:
            return functional.linear(inputs, table)
        outputs = inputs.new_empty(len(inputs), len(table))
        for start in range(0, len(table), BLOCK_ROWS):
            part = slice(start, start + BLOCK_ROWS)
            torch.mm(inputs, table[part].t(), out=outputs[:, part])
        return outputs

    def input_gradient(self, output_gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """[..., n] -> [..., k], into `out` where there is one."""
        return torch.matmul(output_gradient, self.weight(), out=out)

    def gradient(self) -> tuple[Tensor, bool]:
        """The buffer [n, k] of all weights' gradients, and whether it is to be overwritten."""
        first = [buffer for weight in self.weights if (buffer := weight.first_gradient()) is not None]
        assert len(first) in {0, len(self.weights)}, "fused weights have their gradients added together"
        return joined(first or [gradient_of(weight) for weight in self.weights]), bool(first)

    def add_weight_gradient(self, output_gradient: Tensor, inputs: Tensor) -> None:
        """[n, k] += output_gradient [..., n]^T inputs [..., k]; not yet told as added."""
        left = output_gradient.reshape(-1, output_gradient.shape[-1]).t()
        right = inputs.reshape(-1, inputs.shape[-1])
        gradient, first = self.gradient()
        if left.dtype == gradient.dtype:
            gradient.addmm_(left, right, beta=0 if first else 1)
            return
        if not left.is_cpu and gradient.dtype == torch.float32:
            torch.addmm(gradient, left, right, gradient.dtype, beta=0 if first else 1, out=gradient)
            return
        rows = max(1, PRODUCT_ELEMENTS // right.shape[1])
        for into, part in zip(gradient.split(rows), left.split(rows), strict=True):
            if first:
                into.copy_(part @ right)
            else:
                into.add_(part @ right)


def apart_bytes(elements: int, at: Saving) -> int:
    """What the product for a weight's gradient takes beside a sum in another format to which it is added."""
    return min(elements, PRODUCT_ELEMENTS) * at.itemsize if at.itemsize != at.gradient_itemsize else 0


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor over `tensors` that lie behind each other in one Bucket, joined along dim 0."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    end = first.storage_offset()
    for tensor in tensors:
        assert tensor.storage_offset() == end, "fused parameters must be neighbours in their bucket"
        end += tensor.numel()
    rows = sum(tensor.shape[0] for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def gradient_of(parameter: Parameter) -> Tensor:
    """The buffer of a parameter's gradient, which must be there."""
    assert parameter.gradient is not None, f"{parameter.shard.name} has no gradient buffer"
    return parameter.gradient
