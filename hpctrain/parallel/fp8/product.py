"""The products of a layer's matrix in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.parallel.fp8.formats import E4M3, E5M2, Format, agreed_maximum
from hpctrain.parallel.fp8.history import History
from hpctrain.parallel.fp8.multiply import multiplied
from hpctrain.parallel.fp8.quantize import Quantized, Scaling
from hpctrain.parallel.fp8.recipes import Recipe
from hpctrain.parallel.fp8.watched import note_lost
from hpctrain.parallel.groups import LayerGroups
from hpctrain.parallel.product import Product
from hpctrain.parallel.shard import Parameter, Shard

Kind = Literal["inputs", "weights", "gradients"]
"""What is quantized; gradients are those of the output."""

KINDS: tuple[Kind, ...] = ("inputs", "weights", "gradients")

Dims = tuple[Literal["tokens", "inputs", "outputs"], Literal["tokens", "inputs", "outputs"]]
"""Of what a matrix has its rows, and its columns: tokens m, input features k or output features n."""


class QuantizedProduct(Product):
    """All three products are of matrices in 8 bits, scaled by a `recipe`, each made of high precision.

    Inputs and weights are in E4M3, gradients of the output in `gradient_form`. Where a scale is of what
    several ranks have parts of, it follows from the maximum over these, in each product (collective): context
    ranks have tokens of their own, tensor ranks features. It is not for a head: logits stay as stored.
    """

    def __init__(
        self,
        weights: Sequence[Parameter],
        groups: LayerGroups,
        recipe: Recipe,
        gradient_form: Format = E5M2,
    ) -> None:
        super().__init__(weights, groups)
        self.recipe, self.gradient_form = recipe, gradient_form

    def forward(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """See Product."""
        left = self._quantized("inputs", _rows(inputs), ("tokens", "inputs"))
        right = self._quantized("weights", self.weight(), ("outputs", "inputs"))
        output = multiplied(left, right, inputs.dtype).view(*inputs.shape[:-1], -1)
        return output if bias is None else output.add_(bias)

    def input_gradient(self, output_gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """See Product."""
        left = self._quantized("gradients", _rows(output_gradient), ("tokens", "outputs"))
        right = self._quantized("weights", self.weight().t(), ("inputs", "outputs"))
        gradient = multiplied(left, right, output_gradient.dtype).view(*output_gradient.shape[:-1], -1)
        return gradient if out is None else out.copy_(gradient)

    def add_weight_gradient(self, output_gradient: Tensor, inputs: Tensor) -> None:
        """See Product."""
        left = self._quantized("gradients", _rows(output_gradient).t(), ("outputs", "tokens"))
        right = self._quantized("inputs", _rows(inputs).t(), ("inputs", "tokens"))
        gradient, first = self.gradient()
        product = multiplied(left, right, gradient.dtype)
        if first:
            gradient.copy_(product)
        else:
            gradient.add_(product)

    def _quantized(self, kind: Kind, matrix: Tensor, dims: Dims) -> Quantized:
        scaling = self.recipe.weights if kind == "weights" else self.recipe.tokens
        form = self.gradient_form if kind == "gradients" else E4M3
        maxima = self._maxima(kind, scaling, matrix, dims)
        found = scaling.quantized(matrix, form, maxima)
        note_lost(self.groups.noted, self.weights[0].shard.name, kind, " ".join(dims), matrix, maxima, found)
        return found

    def _maxima(self, kind: Kind, scaling: Scaling, matrix: Tensor, dims: Dims) -> Tensor:  # noqa: ARG002
        """The maxima of all that shares a scale."""
        maxima = agreed_maximum(scaling.maxima(matrix))
        holders = self._holders(scaling, dims)
        return maxima if holders is None or holders.size == 1 else holders.all_reduce(maxima, "max")

    def _holders(self, scaling: Scaling, dims: Dims) -> Group | None:
        """The ranks that have parts of what shares a scale: of dims that a block has whole, a rank not."""
        whole = {dim for dim, size in zip(dims, scaling.blocks, strict=True) if size is None}
        split = {
            dim
            for dim, number in (("outputs", 0), ("inputs", 1))
            if any(weight.shard.local[number] != weight.shard.shape[number] for weight in self.weights)
        }
        if "tokens" in whole:
            return self.groups.micro_batch if whole & split else self.groups.context
        return self.groups.tensor if whole & split else None


class DelayedProduct(QuantizedProduct):
    """As QuantizedProduct, by scales that follow from the largest of the maxima of `steps` steps before.

    All ranks agree on a step's maxima once, after it, so that what it does with micro-batches, in whatever
    order or again, is done with the same scales. As long as nothing is known it multiplies as stored.
    """

    def __init__(
        self,
        weights: Sequence[Parameter],
        groups: LayerGroups,
        recipe: Recipe,
        steps: int,
        gradient_form: Format = E5M2,
    ) -> None:
        super().__init__(weights, groups, recipe, gradient_form)
        self.histories = {
            kind: History(groups.tensor.empty((steps,), torch.float32).zero_()) for kind in KINDS
        }
        self._known = False

    @property
    def known(self) -> bool:
        """Whether there is a step before. Waits for the device as long as there is none."""
        maxima = self.histories["inputs"].maxima
        self._known = self._known or maxima.is_meta or bool(maxima.any())
        return self._known

    def forward(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """See Product."""
        self._note("inputs", inputs)
        self._note("weights", self.weight())
        return super().forward(inputs, bias) if self.known else Product.forward(self, inputs, bias)

    def input_gradient(self, output_gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """See Product."""
        self._note("gradients", output_gradient)
        if not self.known:
            return Product.input_gradient(self, output_gradient, out)
        return super().input_gradient(output_gradient, out)

    def add_weight_gradient(self, output_gradient: Tensor, inputs: Tensor) -> None:
        """See Product."""
        self._note("gradients", output_gradient)  # again, unless nothing asks for the input's gradient
        if not self.known:
            Product.add_weight_gradient(self, output_gradient, inputs)
        else:
            super().add_weight_gradient(output_gradient, inputs)

    def state(self) -> Iterator[tuple[str, Shard, Tensor]]:
        """See KeepsState: the maxima of each kind, the newest first."""
        for kind, history in self.histories.items():
            shard = Shard.whole(self.weights[0].shard.name, (len(history.maxima),))
            yield f"fp8/{kind}", shard, history.maxima

    def after_update(self, noted: Mapping[str, Tensor]) -> None:
        """See LearnsOfStep."""
        for kind, history in self.histories.items():
            maximum = noted.get(self._noted_name(kind))  # none of gradients where nothing before is trained
            if maximum is not None:
                history.remember(maximum[0])

    def _maxima(self, kind: Kind, *_: object) -> Tensor:
        return self.histories[kind].largest

    def _note(self, kind: Kind, values: Tensor) -> None:
        self.groups.noted.most(self._noted_name(kind), agreed_maximum(values.abs().amax().reshape(1)))

    def _noted_name(self, kind: Kind) -> str:
        return f"fp8/{self.weights[0].shard.name}/{kind}"


def _rows(values: Tensor) -> Tensor:
    """[..., features] as a matrix."""
    return values.reshape(-1, values.shape[-1])
