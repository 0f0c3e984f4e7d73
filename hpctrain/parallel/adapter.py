"""Low-rank adapters of linear layers (LoRA, arXiv 2106.09685): (W + (alpha / rank) B A) x.

A is [rank, inputs] and B is [outputs, rank]. They are split as the matrix of the layer is, so they need no
messages of their own. If the layer is split by outputs, B is split and every rank has all of A; if it is
split by inputs, A is split and every rank has all of B. The replicated factor has partial gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hpctrain.deck.sections.adapters import Adapters
from hpctrain.parallel.kernels.matmul_kernels import KernelTable
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.matmul import Matmul
from hpctrain.parallel.operations import MatrixSize, MatrixSplit
from hpctrain.parallel.shards import Initial, Parameter, Shard


class AdaptedMatrix(NamedTuple):
    """Matrix of a layer that has an adapter: its shard, and its range of the local outputs."""

    weight: Shard
    outputs: slice


class LayerAdapters(nn.Module):
    """Adapters of the matrices of one layer.

    Args:
        adapted: Matrices that have an adapter.
        split: Features by which tensor ranks split the layer.
        adapters: Rank and scale in the deck.
        layer_context: Context of the layer.

    Attributes:
        inner: Products with the factors A of all matrices, fused to [matrices x rank, k].
        outer: Product with the factor B of each matrix, [n, rank].
    """

    def __init__(
        self,
        adapted: Sequence[AdaptedMatrix],
        split: MatrixSplit,
        adapters: Adapters,
        layer_context: LayerContext,
    ) -> None:
        super().__init__()
        self.adapted, self.split = list(adapted), split
        self.rank, self.scale = adapters.rank, adapters.scale
        partial = frozenset({"tensor"}) if layer_context.tensor.size > 1 else frozenset[str]()
        # These products are too small to measure kernels for them.
        kernels = KernelTable(layer_context.products.kernels.default)
        layer_context = replace(layer_context, products=replace(layer_context.products, kernels=kernels))
        self.outer: list[Matmul] = []
        inner = []
        for weight, _ in adapted:
            name, (outputs, inputs) = weight.name.removesuffix(".weight"), weight.shape
            a = Shard.replicated(f"{name}.adapter.a", (self.rank, inputs), partial)
            b = Shard.replicated(f"{name}.adapter.b", (outputs, self.rank), partial)
            if split == "inputs":
                a = _split_like(weight, a, 1)
            else:
                b = _split_like(weight, b, 0)
            inner.append(a)
            self.outer.append(self._factors([b], "zeros", layer_context))
        self.inner = self._factors(inner, "adapter", layer_context)

    def _factors(self, shards: Sequence[Shard], initial: Initial, layer_context: LayerContext) -> Matmul:
        """Create one factor of some adapters, and return the product with them, fused."""
        weights = [Parameter(replace(shard, zero_exempt=True), initial=initial) for shard in shards]
        for weight in weights:
            self.register_parameter(f"factor{len(self._parameters)}", weight)
        return Matmul(weights, layer_context)

    @property
    def weights(self) -> list[Parameter]:
        """Parameters of the adapters."""
        return [weight for product in (self.inner, *self.outer) for weight in product.weights]

    @property
    def matrices(self) -> list[MatrixSize]:
        """Global matrices of all factors."""
        by_inputs = self.split == "inputs"
        splits: tuple[MatrixSplit, MatrixSplit] = ("inputs", "whole") if by_inputs else ("whole", "outputs")
        sizes = []
        for weight, _ in self.adapted:
            outputs, inputs = weight.shape
            sizes.append(MatrixSize(self.rank, inputs, splits[0], adapter=True))
            sizes.append(MatrixSize(outputs, self.rank, splits[1], adapter=True))
        return sizes

    def add(self, output: Tensor, inputs: Tensor) -> Tensor:
        """Add the adapters' products of inputs [..., k] to the layer's output [..., n].

        Returns:
            Scaled values between the factors, [..., matrices x rank], for the backward pass.
        """
        inner = self.inner.forward(inputs).mul_(self.scale)
        for factor, matrix, part in zip(self.outer, self.adapted, self._split(inner), strict=True):
            output[..., matrix.outputs] += factor.forward(part)
        return inner

    def inner_gradient(self, output_gradient: Tensor) -> Tensor:
        """Return the gradient [..., matrices x rank] between the factors, for an output gradient [..., n]."""
        parts = [
            factor.input_gradient(output_gradient[..., matrix.outputs].contiguous())
            for factor, matrix in zip(self.outer, self.adapted, strict=True)
        ]
        return torch.cat(parts, dim=-1).mul_(self.scale)

    def add_input_gradient(self, input_gradient: Tensor, inner_gradient: Tensor) -> None:
        """Add the adapters' part to the gradient of the inputs [..., k]."""
        input_gradient.add_(self.inner.input_gradient(inner_gradient).view_as(input_gradient))

    def add_weight_gradients(
        self, output_gradient: Tensor, inner: Tensor, inner_gradient: Tensor, inputs: Tensor
    ) -> None:
        """Add to the gradients of A and B. The caller reports the additions.

        Args:
            output_gradient: Gradient of the layer's output [..., n].
            inner: Result of `add`.
            inner_gradient: Result of `inner_gradient`.
            inputs: Inputs [..., k].
        """
        self.inner.add_weight_gradient(inner_gradient, inputs)
        for factor, matrix, part in zip(self.outer, self.adapted, self._split(inner), strict=True):
            factor.add_weight_gradient(output_gradient[..., matrix.outputs].contiguous(), part)

    def _split(self, inner: Tensor) -> list[Tensor]:
        """Return the values between the factors of each matrix."""
        return [part.contiguous() for part in inner.split(self.rank, dim=-1)]


def is_adapter(name: str) -> bool:
    """Return True if a parameter of this name is a factor of an adapter."""
    return name.rpartition(".")[0].endswith(".adapter")


def _split_like(weight: Shard, factor: Shard, dim: int) -> Shard:
    """Return a factor that is split along `dim` as the layer's own matrix is."""
    start, local = list(factor.start), list(factor.local)
    start[dim], local[dim] = weight.start[dim], weight.local[dim]
    unpadded = None
    if weight.unpadded_local is not None:
        unpadded = (*local[:dim], weight.unpadded_local[dim], *local[dim + 1 :])
    return replace(
        factor,
        start=tuple(start),
        local=tuple(local),
        split=weight.split,
        partial=weight.partial,
        holder_counts=weight.holder_counts,
        unpadded_local=unpadded,
    )
