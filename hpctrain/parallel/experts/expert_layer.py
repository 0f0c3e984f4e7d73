"""Experts of a mixture: two grouped products with an activation in between, mostly a gated one.

The matrices of all experts of a rank are one parameter. It is split by expert over the `expert` axis and, as
in Megatron-LM's feed-forward layer, by inner features over the `expert_tensor` axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.deck.activations import Activation
from hpctrain.deck.sections.experts import ExpertsTable
from hpctrain.parallel.backward.autograd import as_features
from hpctrain.parallel.backward.weight_gradients import DeferredGradient
from hpctrain.parallel.experts.grouped_products import (
    Segments,
    add_grouped_bias,
    add_grouped_bias_gradient,
    add_grouped_gradient,
    grouped_product,
)
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import MatrixSize
from hpctrain.parallel.shards import Parameter, Partition, split_shard
from hpctrain.parallel.tensor import MatmulLayer

EXPERT_AXES = frozenset({"expert", "expert_tensor"})


class Experts(MatmulLayer):
    """Feed-forward layers of this rank's experts.

    Their parameters are `<name>.gate_up.weight` [E, 2, f, h], gates first, or `<name>.up.weight` [E, f, h]
    for an activation without a gate, and `<name>.down.weight` [E, h, f]. Biases are `<name>.gate_up.bias`
    [E, 2, f] or `<name>.up.bias` [E, f], and `<name>.down.bias` [E, h]. The ranks of `expert_tensor`, whose
    results are summed, add different features of the latter.

    Args:
        name: Name of the layer.
        settings: Number and inner features of the experts, and the experts of a token.
        hidden: Features of a token, h.
        layer_context: Context of the layer.
        activation: Activation between the products.
        biased: True if biases are added to both products.

    Attributes:
        local: Experts of this rank.
        experts_per_token: Experts that each token goes to.
        capacity: Limit on the rows of an expert, as a multiple of an even load. None if there is none.
        inner: This rank's features of a token within an expert, f.
        bias_columns: Columns of the result to which this rank adds `down_bias`; only with biases.
    """

    def __init__(
        self,
        name: str,
        settings: ExpertsTable,
        hidden: int,
        layer_context: LayerContext,
        activation: Activation,
        biased: bool,
    ) -> None:
        super().__init__()
        self.layer_context, self.activation = layer_context, activation
        self.experts_per_token, self.capacity = settings.per_token, settings.capacity
        experts = Partition.split(settings.count, layer_context.expert)
        columns = Partition.split(settings.mlp, layer_context.expert_tensor)
        self.local, self.hidden, self.inner = experts.local, hidden, columns.local
        up = f"{name}.{'gate_up' if activation.gated else 'up'}"
        rows = (experts, 2, columns) if activation.gated else (experts, columns)
        self.gate_up = Parameter(split_shard(f"{up}.weight", *rows, hidden, axes=EXPERT_AXES))
        down = split_shard(f"{name}.down.weight", experts, hidden, columns, axes=EXPERT_AXES)
        self.down = Parameter(down, initial="residual")
        self.gate_up_bias: Parameter | None = None
        self.down_bias: Parameter | None = None
        if biased:
            features = Partition.split(hidden, layer_context.expert_tensor)
            self.bias_columns = slice(features.start, features.start + features.local)
            first = split_shard(f"{up}.bias", *rows, axes=EXPERT_AXES)
            second = split_shard(f"{name}.down.bias", experts, features, axes=EXPERT_AXES)
            self.gate_up_bias, self.down_bias = (Parameter(each, False, "zeros") for each in (first, second))

    def forward(self, rows: Tensor, segments: Segments, deferred_work: list[DeferredGradient]) -> Tensor:
        """Return the results [m, h] of the rows [m, h] of this rank's experts.

        They are this rank's term of a sum over `expert_tensor`, which the caller adds.

        Args:
            rows: Tokens of this rank's experts, sorted by expert.
            segments: Range of the rows of each expert.
            deferred_work: List to which the backward pass appends the weight gradients, which `Dispatch`
                computes while it waits for the exchange of tokens. Unused if all weight gradients are queued.
        """
        result: Tensor = _ExpertsAutograd.apply(
            rows, self, segments, deferred_work, *self.deferred_parameters
        )
        return result

    def expand(self, rows: Tensor, segments: Segments) -> Tensor:
        """Return the input of the activation, [m, 2 f] or without a gate [m, f], of rows [m, h] by expert."""
        inner = self.multiply(rows, self.gate_up, segments)
        if self.gate_up_bias is not None:
            add_grouped_bias(inner, self.gate_up_bias.detach().flatten(1), segments)
        return inner

    def contract(self, activated: Tensor, segments: Segments) -> Tensor:
        """Return this rank's term [m, h] of the results for the output [m, f] of the activation."""
        output = self.multiply(activated, self.down, segments)
        if self.down_bias is not None:
            add_grouped_bias(output, self.down_bias.detach(), segments, self.bias_columns)
        return output

    def multiply(
        self, rows: Tensor, weight: Parameter, segments: Segments, transposed: bool = False
    ) -> Tensor:
        """Return each row times the transposed matrix [n, k] of its expert, or times the matrix itself.

        Args:
            rows: Rows by expert, [m, k], or [m, n] if `transposed`.
            weight: Weight of all experts.
            segments: Rows of each expert.
            transposed: True for the gradient of the input.
        """
        audit = self.layer_context.products.active_audit
        matrices = weight.detach().view(len(weight), -1, weight.shape[-1])
        output = grouped_product(rows, matrices.transpose(1, 2) if transposed else matrices, segments)
        if audit is not None:
            audit.check_grouped_product(weight, (rows, matrices, output), segments, transposed)
        return output

    @property
    @override
    def matrices(self) -> list[MatrixSize]:
        count, hidden, inner = self.down.shard.shape
        outputs, biased = self.activation.input_projections * inner, self.gate_up_bias is not None
        return [
            MatrixSize(outputs, hidden, "outputs", self.experts_per_token, count, biased=biased),
            MatrixSize(hidden, inner, "inputs", self.experts_per_token, count, biased=biased),
        ]

    @property
    @override
    def deferred_parameters(self) -> list[Parameter]:
        biases = (self.gate_up_bias, self.down_bias)
        return [self.gate_up, self.down, *(bias for bias in biases if bias is not None)]


class _ExpertsAutograd(torch.autograd.Function):
    """Autograd function that saves the rows and the first product; it recomputes the activation.

    The backward pass replaces the first product by its gradient, so a graph has one backward pass.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any,
        rows: Tensor,
        experts: Experts,
        segments: Segments,
        deferred_work: list[DeferredGradient],
        *_: Tensor,
    ) -> Tensor:
        ctx.experts, ctx.segments, ctx.deferred_work = experts, segments, deferred_work
        inner = experts.expand(rows, segments)
        ctx.save_for_backward(as_features(rows), as_features(inner))
        return experts.contract(_activate(inner, experts.activation), segments)

    @staticmethod
    @override
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        experts: Experts = ctx.experts
        segments: Segments = ctx.segments
        rows, inner = (saved[0, 0] for saved in ctx.saved_tensors)
        output_gradient = output_gradient.contiguous()
        activated = _activate(inner, experts.activation)
        activated_gradient = experts.multiply(output_gradient, experts.down, segments, transposed=True)
        inner_gradient = _activation_gradient(inner, activated_gradient, experts.activation)
        del inner, activated_gradient
        rows_gradient = None
        if ctx.needs_input_grad[0]:
            rows_gradient = experts.multiply(inner_gradient, experts.gate_up, segments, transposed=True)

        def compute() -> None:
            audit = experts.layer_context.products.active_audit
            add_grouped_gradient(output_gradient, activated, experts.down, segments, audit)
            add_grouped_gradient(inner_gradient, rows, experts.gate_up, segments, audit)
            if experts.gate_up_bias is not None and experts.down_bias is not None:
                columns = experts.bias_columns
                add_grouped_bias_gradient(output_gradient, experts.down_bias, segments, columns)
                add_grouped_bias_gradient(inner_gradient, experts.gate_up_bias, segments)

        queue = experts.layer_context.weight_gradients
        if queue.deferring:
            queue.submit(compute, output_gradient, activated, inner_gradient, rows)
        else:
            ctx.deferred_work.append(DeferredGradient(compute))
        return (rows_gradient, *(None for _ in ctx.needs_input_grad[1:]))


def _activate(inner: Tensor, activation: Activation) -> Tensor:
    """Return the activation [m, f] of [m, f], or of gates and their factors side by side, [m, 2 f]."""
    if not activation.gated:
        return activation.function.value(inner)
    gate, up = inner.chunk(2, dim=1)
    if activation.up_function is not None:
        up = activation.up_function.value(up)
    return activation.function.value(gate).mul_(up)


def _activation_gradient(inner: Tensor, gradient: Tensor, activation: Activation) -> Tensor:
    """Return the gradient of the input of `_activate`, in the memory of `inner` or of `gradient`.

    Args:
        inner: Input of `_activate`. With a gate its memory receives the result.
        gradient: Gradient [m, f] of the result of `_activate`. Without a gate its memory receives the result.
        activation: Activation between the products.
    """
    function = activation.function
    if not activation.gated:
        function.gradient(gradient, inner, gradient)
        return gradient
    gate, up = inner.chunk(2, dim=1)
    value, up_function = function.value(gate), activation.up_function
    gate_gradient = gradient * (up if up_function is None else up_function.value(up))
    if up_function is None:
        torch.mul(gradient, value, out=up)
    else:
        up_function.gradient(gradient * value, up, up)
    function.gradient(gate_gradient, gate, gate)
    return inner
