"""Mixture of experts in place of a feed-forward layer, and the block with it.

A few of the experts compute each token.

The tokens of a rank are split over the tensor axis before they are routed, with or without sequence
parallelism. So each rank of a stage routes different tokens. The experts are on the same ranks, in groups of
their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hpctrain.deck.activations import ACTIVATIONS
from hpctrain.model.block import FeedForward, PassContext, TransformerBlock
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.mixtures.router import RoutedTokens, Router
from hpctrain.model.part import Unit, parameters_by_module
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.backward.autograd import apply_function, exchange
from hpctrain.parallel.experts.dispatch import Dispatch
from hpctrain.parallel.experts.expert_layer import Experts
from hpctrain.parallel.experts.grouped_products import row_unit
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import ElementwiseSize, MatrixSize, elementwise_kind
from hpctrain.parallel.residency import ParameterResidency
from hpctrain.parallel.shards import Parameter, Shard


class Mixture(nn.Module):
    """Mixture of experts, [s or s/t, b, h] -> the same shape.

    The result is the weighted sum of a token's experts, plus the shared experts, perhaps times a gate.
    """

    def __init__(self, name: str, shape: ModelShape, layer_context: LayerContext) -> None:
        super().__init__()
        assert shape.experts is not None
        settings = shape.experts
        self.layer_context, self.hidden, self.settings = layer_context, shape.hidden, settings
        self.router = Router(f"{name}.router", shape, layer_context)
        activation, biased = ACTIVATIONS[shape.activation], shape.mlp_bias
        self.experts = Experts(f"{name}.experts", settings, shape.hidden, layer_context, activation, biased)
        inner = settings.shared * settings.mlp
        # The router saves the same input.
        self.shared = FeedForward(f"{name}.shared", shape, layer_context, inner, True) if inner else None
        gated = settings.shared_gate and self.shared is not None
        self.shared_gate = SharedGate(f"{name}.shared_gate", shape, layer_context) if gated else None

    def forward(self, x: Tensor, inputs: ModelInputs, residency: ParameterResidency) -> Tensor:
        """Route and send tokens, compute experts, and combine the results. Collective over the expert group.

        Shared experts compute while tokens are on their way. Padding is computed by shared experts only.
        """
        layer_context = self.layer_context
        sizes = self.layer_context.row_sizes(inputs.tokens.numel())
        first = sum(sizes[: self.layer_context.tensor.rank])
        local_range = slice(first, first + sizes[self.layer_context.tensor.rank])
        flat = x.flatten(0, 1)
        split = self.layer_context.tensor.size > 1 and not self.layer_context.sequence_parallel
        take, gather = partial(self._take_local_rows, sizes), partial(self._gather_rows, sizes)
        rows = exchange(flat, take, gather) if split else flat
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            # Backward must run through both ends of the exchange, even if all before it is frozen.
            rows = rows if rows.requires_grad else rows.detach().requires_grad_()
        tokens = RoutedTokens.of(inputs, local_range)
        routing = self.router(rows, tokens, inputs)
        unit = row_unit(rows.dtype, rows.device)
        dispatch = Dispatch(
            routing.experts,
            routing.accepted_choices,
            self.settings.count,
            layer_context.expert,
            layer_context.expert_tensor,
            unit,
        )
        arriving = dispatch.send(tokens.select(rows))
        shared = self.shared(x) if self.shared is not None else None
        if self.shared_gate is not None and shared is not None:
            shared = self.shared_gate(shared, x)
        compute = partial(self.experts, segments=dispatch.segments, deferred_work=dispatch.deferred_work)
        results = residency.run_layer(self.experts.gate_up, compute, dispatch.receive(arriving))
        combined = tokens.expand(dispatch.combine(dispatch.send_back(results), routing.weights))
        all_rows = exchange(combined, gather, take) if split else combined
        output = all_rows.view_as(x)
        return output if shared is None else output + shared

    def _take_local_rows(self, sizes: Sequence[int], rows: Tensor) -> Tensor:
        """Return the rows of this rank among rows that all tensor ranks have: rank i has `sizes[i]` rows."""
        local: Tensor = rows.split(list(sizes))[self.layer_context.tensor.rank]
        return local

    def _gather_rows(self, sizes: Sequence[int], rows: Tensor) -> Tensor:
        """Return the rows of all tensor ranks. Collective over them."""
        return self.layer_context.tensor.all_gather(rows, sizes=sizes)

    @property
    def elementwise(self) -> list[ElementwiseSize]:
        """Elementwise operations: tokens are gathered by expert, activated, and summed again."""
        chosen, inner = self.settings.per_token, self.settings.mlp
        copies = ElementwiseSize("add", 2 * chosen * self.hidden)
        shared = self.shared.elementwise if self.shared is not None else []
        return [
            copies,
            ElementwiseSize(elementwise_kind(self.experts.activation), chosen * inner, True),
            *shared,
        ]

    @property
    def auxiliary_loss_names(self) -> tuple[str, ...]:
        """Names of the auxiliary losses of the layer."""
        return self.router.auxiliary_loss_names


class MixtureBlock(TransformerBlock):
    """TransformerBlock with a mixture of experts in place of its feed-forward part."""

    kind_name = "mixture"
    feed_forward: Mixture

    def __init__(self, index: int, shape: ModelShape, layer_context: LayerContext) -> None:
        super().__init__(index, shape, layer_context)
        self.auxiliary_loss_names = self.feed_forward.auxiliary_loss_names

    @override
    def _make_feed_forward(self, name: str, shape: ModelShape, layer_context: LayerContext) -> Mixture:
        return Mixture(name, shape, layer_context)

    @override
    def run_feed_forward(self, x: Tensor, context: PassContext) -> Tensor:
        output: Tensor = self.feed_forward(x, context.inputs, context.residency)
        return output

    def units(self) -> Iterator[Unit]:
        """Yield the units of the block. Experts are one of their own, since they are needed later."""
        experts = self.feed_forward.experts
        yield [leaf for leaf in parameters_by_module(self) if leaf[0] is not experts.gate_up]
        yield list(parameters_by_module(experts))

    @override
    def backward_order(self) -> Iterator[tuple[Parameter | None, list[Parameter]]]:
        experts = self.feed_forward.experts
        others = [p for p in self.all_parameters[::-1] if p not in set(experts.deferred_parameters)]
        yield experts.gate_up, []
        yield None, [*experts.deferred_parameters, *others]

    @property
    @override
    def matrices(self) -> list[MatrixSize]:
        # Router [n, h] and shared gate [1, h] are no MatmulLayers, so `super()` does not list them. They
        # multiply the same input, so they count as one matrix [n + 1, h].
        experts, hidden = self.feed_forward.router.weight.shard.shape
        rows = experts if self.feed_forward.shared_gate is None else experts + 1
        return [*super().matrices, MatrixSize(rows, hidden, "whole")]


class SharedGate(nn.Module):
    """Factor of the result of shared experts, the sigmoid of a linear layer of their input (Qwen2-MoE)."""

    def __init__(self, name: str, shape: ModelShape, layer_context: LayerContext) -> None:
        super().__init__()
        shard = Shard.replicated(f"{name}.weight", (1, shape.hidden), layer_context.sequence_partial)
        self.weight = Parameter(shard, initial="router")

    def forward(self, shared: Tensor, x: Tensor) -> Tensor:
        """Return the result of shared experts [s or s/t, b, h] times the gate of their input x."""
        result: Tensor = apply_function(_Gate, shared, x, self.weight)
        return result


class _Gate(torch.autograd.Function):
    """Product of `shared` and the sigmoid of x times a vector. It saves one number of each row besides."""

    @staticmethod
    @override
    def forward(ctx: Any, shared: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        gate = (x @ weight.t()).float().sigmoid_()
        ctx.save_for_backward(shared, x, weight, gate)
        return (shared * gate).to(shared.dtype)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        shared, x, weight, gate = ctx.saved_tensors
        of_gate = (gradient * shared).sum(-1, keepdim=True, dtype=torch.float32)
        of_product = of_gate * gate * (1 - gate)
        of_weight = None
        if ctx.needs_input_grad[2]:
            of_weight = (of_product.flatten(0, 1).t() @ x.flatten(0, 1).float()).to(weight.dtype)
        of_x = of_product.to(x.dtype) * weight.view(-1) if ctx.needs_input_grad[1] else None
        return (gradient * gate).to(shared.dtype), of_x, of_weight
