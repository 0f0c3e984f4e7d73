"""Tensor parallelism: linear layers split by output or input features (Megatron-LM, arXiv 1909.08053).

A `ColumnLinear` splits its matrix by output features, a `RowLinear` by input features. One after the other
they need one sum over tensor ranks in the forward pass, for which the row layer waits. With 2 ranks,
X [s, b, h], A [4h, h] and B [h, 4h]:

    rank 0:  X ── A[:2h] ── activation ── B[:, :2h] ──┐
                                                      (+) all-reduce ── Y on both ranks
    rank 1:  X ── A[2h:] ── activation ── B[:, 2h:] ──┘

In the backward pass the gradient of X is summed instead. Under sequence parallelism (arXiv 2205.05198) X and
Y are pieces [s/2, b, h] of the sequence: the first layer gathers X, and the sum of the second is a
reduce-scatter. What is saved for the backward pass is the piece, which is gathered again.

One autograd function for each layer makes these calls. Of the sums, only that of the column layer's input
gradient overlaps with computation: it starts before the weight gradient is computed and added to the gradient
buffer of the bucket. Activations are sequence first, so that pieces of a sequence are contiguous.

The classes of linear layers, of which each has one product (`Matmul`):

    SplitLinear             fused weights, their biases and adapters
    ├── ColumnLinear        split by output features
    ├── RowLinear           split by input features
    ├── ReplicatedLinear    not split                            (replicated_linear.py)
    └── ReplacementLinear   replacement of a module's own layer  (model/modules/)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from hpctrain.comm.group import Group
from hpctrain.deck.sections.adapters import Adapters
from hpctrain.parallel.adapter import AdaptedMatrix, LayerAdapters
from hpctrain.parallel.backward.autograd import apply_function
from hpctrain.parallel.fp8.matmul_choice import make_matmul
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.matmul import (
    Matmul,
    Operand,
    join_neighbors,
    operand_tensors,
    start_gather_saved,
)
from hpctrain.parallel.operations import MatrixSize, MatrixSplit
from hpctrain.parallel.shards import Initial, Parameter, Partition, Shard, gradient_of, split_shard


class MatmulLayer(nn.Module, ABC):
    """Layer that multiplies activations with matrices, and may compute their gradients later."""

    @property
    @abstractmethod
    def matrices(self) -> list[MatrixSize]:
        """Global matrices that activations are multiplied with."""

    @property
    @abstractmethod
    def deferred_parameters(self) -> list[Parameter]:
        """Parameters whose gradients the queue of weight gradients may defer."""


@dataclass(frozen=True)
class LinearSpec:
    """Features, names and options of a linear layer Y = X A^T + b, however tensor ranks split it.

    Several outputs, such as query, key and value, are computed by one product.

    Attributes:
        inputs: Input features k of all tensor ranks, or this rank's range of them if ranks split inputs.
        outputs: Name and features of each output, with parameters `<name>.weight` and `<name>.bias`. The
            features are this rank's range of them if ranks split outputs, else their number.
        biased: True for a layer with biases.
        shared_input: True if another layer saves the same input for its backward pass.
        adapters: Low-rank adapters of the deck, or None.
        by_heads: True if tensor ranks split the features by heads, which they may divide unevenly.
    """

    inputs: int | Partition
    outputs: Sequence[tuple[str, int | Partition]]
    biased: bool = False
    shared_input: bool = False
    adapters: Adapters | None = None
    by_heads: bool = False

    def parameters(
        self, shards: Iterable[tuple[Shard, Shard]], initial: Initial = "normal"
    ) -> tuple[list[Parameter], list[Parameter]]:
        """Return new weights and biases, for the shards of the weight and the bias of each output."""
        weights, biases = zip(*shards, strict=True)
        return (
            [Parameter(weight, initial=initial) for weight in weights],
            [Parameter(bias, False, "zeros") for bias in biases] if self.biased else [],
        )


class SplitLinear(MatmulLayer):
    """Base class of the linear layers: fused weights with their biases, their product, and adapters.

    Args:
        layer_context: Context of the layer.
        weights: Weights [n_i, k], which are fused along n.
        biases: Bias [n_i] of each weight, or none.
        shared_input: True if another layer saves the same input for its backward pass.
        adapters: Low-rank adapters of the deck, of which the layer takes those of its weights, or None.
        product: Product with the weights; None for the one that the context chooses.

    Attributes:
        split: Features by which tensor ranks split the matrix.
        autograd: Function with the forward and the backward pass.
        by_heads: True if tensor ranks split the features by heads. Plans predict its time by the rank with
            the most heads.
        split_sizes: Local features of the output of each weight.
        weights: Weights, which are neighbours in one bucket.
        biases: Biases, which are neighbours, too.
        product: Products with all weights.
        adapter: Low-rank matrices that are added to the weights. None if there are none.
    """

    split: ClassVar[MatrixSplit]
    autograd: ClassVar[type[torch.autograd.Function]]
    by_heads = False

    def __init__(
        self,
        layer_context: LayerContext,
        weights: Sequence[Parameter],
        biases: Sequence[Parameter],
        shared_input: bool = False,
        adapters: Adapters | None = None,
        product: Matmul | None = None,
    ) -> None:
        super().__init__()
        self.layer_context, self.shared_input = layer_context, shared_input
        self.weights, self.biases = list(weights), list(biases)
        for kind, parameters in (("weight", weights), ("bias", biases)):
            for number, parameter in enumerate(parameters):
                self.register_parameter(f"{kind}{number}", parameter)
        self.product = make_matmul(self.weights, layer_context) if product is None else product
        self.split_sizes = self.product.output_sizes
        self.adapter = None if adapters is None else self._make_adapter(adapters)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer. Collective over tensor ranks."""
        parameters = *self.weights, *self.biases, *self.adapter_parameters
        result: Tensor = apply_function(self.autograd, x, self, torch.is_grad_enabled(), *parameters)
        return result

    def _make_adapter(self, adapters: Adapters) -> LayerAdapters | None:
        """Return the adapters of the weights that `adapters` names, or None if it names none of them."""
        matrices, row = [], 0
        for weight, rows in zip(self.weights, self.split_sizes, strict=True):
            if adapters.adapts(weight.shard.name.removesuffix(".weight")):
                matrices.append(AdaptedMatrix(weight.shard, slice(row, row + rows)))
            row += rows
        return LayerAdapters(matrices, self.split, adapters, self.layer_context) if matrices else None

    def bias(self) -> Tensor | None:
        """Return all biases as one vector [n], or None if there are none."""
        return join_neighbors([parameter.detach() for parameter in self.biases]) if self.biases else None

    @property
    @override
    def matrices(self) -> list[MatrixSize]:
        outputs = sum(weight.shard.shape[0] for weight in self.weights)
        adapter = [] if self.adapter is None else self.adapter.matrices
        inputs, biased = self.weights[0].shard.shape[1], bool(self.biases)
        return [MatrixSize(outputs, inputs, self.split, biased=biased, by_heads=self.by_heads), *adapter]

    @property
    @override
    def deferred_parameters(self) -> list[Parameter]:
        # RowAutograd never defers the gradients of biases, ColumnAutograd does.
        return self.weights + (self.biases if self.split == "outputs" else []) + self.adapter_parameters

    @property
    def adapter_parameters(self) -> list[Parameter]:
        """Parameters of the adapter; empty if there is none."""
        return [] if self.adapter is None else self.adapter.weights

    @property
    def sequence_group(self) -> Group | None:
        """Ranks that split the sequence before and after the layer, or None."""
        return self.layer_context.tensor if self.layer_context.sequence_parallel else None

    def on_backward(self) -> None:
        """Do nothing at the start of a backward pass. Subclasses may check it."""

    def mark_gradient_added(self, parameters: Sequence[Parameter]) -> None:
        """Report that one addition to the gradients of these parameters is complete."""
        for parameter in parameters:
            parameter.mark_gradient_added()

    # What the autograd functions call

    def _multiply(
        self, x: Tensor, bias: Tensor | None, sequence_group: Group | None, training: bool
    ) -> tuple[Tensor, Operand, tuple[Tensor, ...]]:
        """Return the product, what backward needs of x, and what the adapter's backward needs.

        Args:
            x: Inputs [..., k], with a `sequence_group` this rank's piece of the tokens.
            bias: Bias [n] that is added, or None.
            sequence_group: Ranks that have the other pieces, or None.
            training: False if there will be no backward pass.
        """
        if self.adapter is None:
            compact = training and not self.shared_input
            return *self.product.forward_and_save(x, bias, sequence_group, compact), ()
        gathered = x if sequence_group is None else sequence_group.all_gather(x)
        output = self.product.forward(gathered, bias)
        return output, x, (self.adapter.add(output, gathered),)

    def _split_saved(self, saved: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Operand]:
        """Return what the forward pass saved, of the adapter and of the input."""
        count = int(self.adapter is not None)
        return saved[:count], self.product.saved_operand(saved[count:])

    def _add_inner_gradient(
        self, output_gradient: Operand, input_gradient: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the gradient between the adapter's factors, and add its part of the input gradient."""
        if self.adapter is None:
            return ()
        assert isinstance(output_gradient, Tensor)
        inner_gradient = self.adapter.inner_gradient(output_gradient)
        if input_gradient is not None:
            self.adapter.add_input_gradient(input_gradient, inner_gradient)
        return (inner_gradient,)

    def _add_gradients(self, output_gradient: Operand, saved: Operand, inner: Sequence[Tensor]) -> None:
        """Add the gradients of the weights, and those of the adapter by the values between its factors."""
        if self.weights[0].requires_grad:
            self.product.add_weight_gradient(output_gradient, saved)
            self.mark_gradient_added(self.weights)
        if self.adapter is not None:
            assert isinstance(output_gradient, Tensor) and isinstance(saved, Tensor)
            values, gradient = inner
            self.adapter.add_weight_gradients(output_gradient, values, gradient, saved)
            self.mark_gradient_added(self.adapter.weights)

    def _add_bias_gradients(self, output_gradient: Tensor) -> None:
        """Add the sum of an output gradient [..., n] over all tokens to the gradients of the biases."""
        if self.biases and self.biases[0].requires_grad:
            gradient = join_neighbors([gradient_of(bias) for bias in self.biases])
            gradient.add_(output_gradient.reshape(-1, output_gradient.shape[-1]).sum(0))
            self.mark_gradient_added(self.biases)


class ColumnAutograd(torch.autograd.Function):
    """Forward and backward pass of a layer whose ranks have complete inputs, or pieces of the sequence.

    Its arguments are the input, the layer, whether it is trained, and all its parameters. The gradients of
    parameters are added to their buffers and not returned.
    """

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, layer: SplitLinear, training: bool, *_: Tensor) -> Tensor:
        ctx.layer = layer
        output, saved, inner = layer._multiply(x, layer.bias(), layer.sequence_group, training)
        ctx.save_for_backward(*inner, *operand_tensors(saved))
        return output

    @staticmethod
    @override
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer: SplitLinear = ctx.layer
        layer.on_backward()
        layer_context, product, sequence_group = layer.layer_context, layer.product, layer.sequence_group
        inner, saved = layer._split_saved(ctx.saved_tensors)
        output_gradient = output_gradient.contiguous()
        finish_gather = None
        if sequence_group is not None and not layer_context.weight_gradients.deferring:
            finish_gather = start_gather_saved(saved, sequence_group)
        gradient = product.gather_gradient(output_gradient, None)
        reduction, input_gradient = None, None
        if ctx.needs_input_grad[0]:
            input_gradient = product.input_gradient(gradient).view(*output_gradient.shape[:-1], -1)
        inner = (*inner, *layer._add_inner_gradient(gradient, input_gradient))
        if input_gradient is not None:
            reduction = layer_context.start_tensor_sum(input_gradient)

        bias_gradient = output_gradient if layer.biases else None

        def compute() -> None:
            inputs = saved
            if finish_gather is not None:
                inputs = finish_gather()
            elif sequence_group is not None:
                inputs = start_gather_saved(saved, sequence_group, blocking=True)()
            layer._add_gradients(gradient, inputs, inner)
            if bias_gradient is not None:
                layer._add_bias_gradients(bias_gradient)

        tensors = [*operand_tensors(saved), *operand_tensors(gradient)]
        if bias_gradient is not None and gradient is not bias_gradient:
            tensors.append(bias_gradient)
        layer_context.weight_gradients.submit(compute, *tensors, *inner)
        result = None if reduction is None else reduction.wait()
        return (result, None, None, *(None for _ in ctx.needs_input_grad[3:]))


class RowAutograd(torch.autograd.Function):
    """Forward and backward pass of a layer whose ranks have pieces of the input features.

    It has the arguments of `ColumnAutograd`.
    """

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, layer: SplitLinear, training: bool, *_: Tensor) -> Tensor:
        ctx.layer = layer
        layer_context, bias = layer.layer_context, layer.bias()
        is_only_rank = layer_context.tensor.size == 1
        output, saved, inner = layer._multiply(x, bias if is_only_rank else None, None, training)
        ctx.save_for_backward(*inner, *operand_tensors(saved))
        if is_only_rank:
            return output
        output = layer_context.tensor_sum(output)
        return output if bias is None else output.add_(bias)

    @staticmethod
    @override
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer: SplitLinear = ctx.layer
        layer.on_backward()
        layer_context, product = layer.layer_context, layer.product
        inner, saved = layer._split_saved(ctx.saved_tensors)
        output_gradient = output_gradient.contiguous()
        layer._add_bias_gradients(output_gradient)
        gathered, result = product.gather_gradient(output_gradient, layer.sequence_group), None
        if ctx.needs_input_grad[0]:
            batch = output_gradient.shape[1:-1]
            input_gradient = product.input_gradient(gathered)
            result = input_gradient.view(-1, *batch, input_gradient.shape[-1])
        inner = (*inner, *layer._add_inner_gradient(gathered, result))
        tensors = (*operand_tensors(gathered), *operand_tensors(saved), *inner)
        layer_context.weight_gradients.submit(lambda: layer._add_gradients(gathered, saved, inner), *tensors)
        return (result, None, None, *(None for _ in ctx.needs_input_grad[3:]))


class ColumnLinear(SplitLinear):
    """Linear layer Y = X A^T + b with A split by output features.

    The input is [s, b, k], the same on all tensor ranks; under sequence parallelism this rank's piece
    [s/t, b, k]. The output is this rank's features, [s, b, sum of split_sizes].

    Args:
        spec: Features, names and options, with this rank's range of the features of each output.
        layer_context: Context of the layer.
    """

    split = "outputs"
    autograd = ColumnAutograd

    def __init__(self, spec: LinearSpec, layer_context: LayerContext) -> None:
        shards = [
            (split_shard(f"{name}.weight", rows, spec.inputs), split_shard(f"{name}.bias", rows))
            for name, rows in spec.outputs
        ]
        super().__init__(layer_context, *spec.parameters(shards), spec.shared_input, spec.adapters)
        self.by_heads = spec.by_heads


class RowLinear(SplitLinear):
    """Linear layer Y = X A^T + b with A split by input features.

    Tensor ranks sum their partial outputs. The bias is added once, after the sum.

    The input is this rank's features [s, b, k/t]. The output is [s, b, n], the same on all tensor ranks, or
    under sequence parallelism this rank's piece [s/t, b, n].

    Args:
        spec: Features, names and options, with this rank's range of the inputs.
        layer_context: Context of the layer.
    """

    split = "inputs"
    autograd = RowAutograd

    def __init__(self, spec: LinearSpec, layer_context: LayerContext) -> None:
        shards, partial = [], layer_context.sequence_partial
        for name, rows in spec.outputs:
            weight = split_shard(f"{name}.weight", rows, spec.inputs)
            shards.append((weight, Shard.replicated(f"{name}.bias", weight.shape[:1], partial)))
        parameters = spec.parameters(shards, "residual")
        super().__init__(layer_context, *parameters, spec.shared_input, spec.adapters)
        self.by_heads = spec.by_heads
