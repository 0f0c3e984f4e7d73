"""Low-rank matrices beside those of a linear layer (LoRA, arXiv 2106.09685): (W + (alpha / rank) B A) x.

They are cut as the layer's own are, and go along with its messages: of a layer that is split by outputs every
rank has all of A, of one that is split by inputs all of B, and their gradients arrive in parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hpctrain.deck.sections.adapters import Adapters
from hpctrain.parallel.activation_sizes import ActivationSizes, SavedStorage
from hpctrain.parallel.kernels.matmul_kernels import KernelTable
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.matmul import Matmul
from hpctrain.parallel.operations import Cut, MatrixSize
from hpctrain.parallel.shards import Initial, Parameter, Shard


class AdaptedMatrix(NamedTuple):
    """A matrix of a layer that has an adapter: its Shard, and which local outputs are its."""

    weight: Shard
    outputs: slice


class Factors(nn.Module):
    """One factor of some adapters: matrices that lie behind each other, with the Matmul of all."""

    def __init__(self, shards: Sequence[Shard], initial: Initial, groups: LayerContext) -> None:
        super().__init__()
        self.weights = [Parameter(shard, initial=initial) for shard in shards]
        for index, weight in enumerate(self.weights):
            self.register_parameter(f"weight{index}", weight)
        self.product = Matmul(self.weights, groups)


class LayerAdapters(nn.Module):
    """Those of the matrices of one layer at these `places`, which tensor ranks `cut`.

    `inner` is A of all of them, [places x rank, k], and `outer` the B of each, [n, rank].
    """

    def __init__(
        self, places: Sequence[AdaptedMatrix], cut: Cut, adapters: Adapters, groups: LayerContext
    ) -> None:
        super().__init__()
        self.places, self.cut, self.rank, self.scale = list(places), cut, adapters.rank, adapters.scale
        whole = frozenset({"tensor"}) if groups.tensor.size > 1 else frozenset[str]()
        # Products so small are the library's, or what the deck names.
        groups = replace(groups, kernels=KernelTable(groups.kernels.other))
        inner, self.outer = [], nn.ModuleList()
        for weight, _ in places:
            name, (outputs, inputs) = weight.name.removesuffix(".weight"), weight.shape
            a = Shard.whole(f"{name}.adapter.a", (self.rank, inputs), whole)
            b = Shard.whole(f"{name}.adapter.b", (outputs, self.rank), whole)
            if cut == "inputs":
                a = _cut_as(weight, a, 1)
            else:
                b = _cut_as(weight, b, 0)
            inner.append(replace(a, zero_exempt=True))
            self.outer.append(Factors([replace(b, zero_exempt=True)], "zeros", groups))
        self.inner = Factors(inner, "adapter", groups)

    @property
    def weights(self) -> list[Parameter]:
        """All of its parameters."""
        return [*self.inner.weights, *(weight for factors in self._outer for weight in factors.weights)]

    @property
    def matrices(self) -> list[MatrixSize]:
        """The whole matrices, as a layer tells its own."""
        cuts: tuple[Cut, Cut] = ("inputs", "whole") if self.cut == "inputs" else ("whole", "outputs")
        found = []
        for weight, _ in self.places:
            outputs, inputs = weight.shape
            found.append(MatrixSize(self.rank, inputs, cuts[0], beside=True))
            found.append(MatrixSize(outputs, self.rank, cuts[1], beside=True))
        return found

    def saved(self, at: ActivationSizes) -> SavedStorage:
        """What is kept between its factors, of all tokens."""
        return SavedStorage(at.tokens * len(self.places) * self.rank * at.itemsize, at.itemsize)

    def add(self, output: Tensor, inputs: Tensor) -> Tensor:
        """Add to the layer's output [..., n] of inputs [..., k]; what is to be kept [..., places x rank]."""
        inner = self.inner.product.forward(inputs).mul_(self.scale)
        for factors, place, part in zip(self._outer, self.places, self._parts(inner), strict=True):
            output[..., place.outputs] += factors.product.forward(part)
        return inner

    def inner_gradient(self, output_gradient: Tensor) -> Tensor:
        """The gradient of what is between A and B, [..., places x rank], of that of the layer's output."""
        parts = [
            factors.product.input_gradient(output_gradient[..., place.outputs].contiguous())
            for factors, place in zip(self._outer, self.places, strict=True)
        ]
        return torch.cat(parts, dim=-1).mul_(self.scale)

    def add_input_gradient(self, input_gradient: Tensor, inner_gradient: Tensor) -> None:
        """Add to the gradient of the inputs [..., k]."""
        input_gradient.add_(self.inner.product.input_gradient(inner_gradient).view_as(input_gradient))

    def add_weight_gradients(
        self, output_gradient: Tensor, inner: Tensor, inner_gradient: Tensor, inputs: Tensor
    ) -> None:
        """Add to the gradients of A and B; not yet told as added."""
        self.inner.product.add_weight_gradient(inner_gradient, inputs)
        for factors, place, part in zip(self._outer, self.places, self._parts(inner), strict=True):
            factors.product.add_weight_gradient(output_gradient[..., place.outputs].contiguous(), part)

    @property
    def _outer(self) -> list[Factors]:
        return [each for each in self.outer if isinstance(each, Factors)]

    def _parts(self, inner: Tensor) -> list[Tensor]:
        """What is between the factors of each place."""
        return [part.contiguous() for part in inner.split(self.rank, dim=-1)]


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is a factor of one."""
    return name.rpartition(".")[0].endswith(".adapter")


def _cut_as(weight: Shard, whole: Shard, dim: int) -> Shard:
    """A factor that is cut along a dim as the layer's own matrix is."""
    start, local = list(whole.start), list(whole.local)
    start[dim], local[dim] = weight.start[dim], weight.local[dim]
    return replace(
        whole,
        start=tuple(start),
        local=tuple(local),
        split=weight.split,
        partial=weight.partial,
        copies=weight.copies,
    )
