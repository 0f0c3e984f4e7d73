"""Mixture of experts in place of a feed-forward layer: a few of many experts compute each token.

The tokens of a rank are split over the tensor axis before they are routed, with or without sequence
parallelism. So every rank of a stage sends other tokens to the experts. The experts are on the same ranks,
in groups of their own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.comm.group import Group
from hpctrain.deck.activations import ACTIVATIONS
from hpctrain.model.feed_forward import FeedForward
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.router import RoutedTokens, Router
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.experts.dispatch import Dispatch
from hpctrain.parallel.experts.expert_layer import Experts, ExpertSizes
from hpctrain.parallel.experts.grouped_products import row_unit
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import ElementwiseSize, kind_of
from hpctrain.parallel.residency import ParameterResidency


class Mixture(nn.Module):
    """Mixture of experts, [s or s/t, b, h] -> the same shape.

    The result is the weighted sum of a token's experts, plus the shared experts.
    """

    def __init__(self, name: str, shape: ModelShape, layer_context: LayerContext) -> None:
        super().__init__()
        self.layer_context, self.shape = layer_context, shape
        self.router = Router(f"{name}.router", shape, layer_context)
        sizes = ExpertSizes(shape.experts, shape.experts_per_token, shape.hidden, shape.expert_mlp)
        activation = ACTIVATIONS[shape.activation]
        self.experts = Experts(f"{name}.experts", sizes, layer_context, shape.capacity, activation)
        inner = shape.shared_experts * shape.expert_mlp
        # The router saves the same input.
        self.shared = FeedForward(f"{name}.shared", shape, layer_context, inner, True) if inner else None

    def forward(self, x: Tensor, inputs: ModelInputs, residency: ParameterResidency) -> Tensor:
        """Route and send tokens, compute experts, and combine the results. Collective over the expert group.

        Shared experts compute while tokens are on their way. Padding is computed by shared experts only.
        """
        layer_context = self.layer_context
        sizes = self.layer_context.row_sizes(inputs.tokens.numel())
        first = sum(sizes[: self.layer_context.tensor.rank])
        own = slice(first, first + sizes[self.layer_context.tensor.rank])
        flat = x.flatten(0, 1)
        split = self.layer_context.tensor.size > 1 and not self.layer_context.sequence_parallel
        rows = _LocalRows.apply(flat, self.layer_context.tensor, sizes) if split else flat
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            # Backward must run through both ends of the exchange, even if all before it is frozen.
            rows = rows if rows.requires_grad else rows.detach().requires_grad_()
        tokens = RoutedTokens.of(inputs, own)
        routing = self.router(rows, tokens, inputs)
        unit = row_unit(rows.dtype, rows.device)
        dispatch = Dispatch(
            routing.experts,
            routing.accepted,
            self.shape.experts,
            layer_context.expert,
            layer_context.expert_tensor,
            unit,
        )
        coming = dispatch.send(tokens.select(rows))
        shared = self.shared(x) if self.shared is not None else None
        compute = partial(self.experts, segments=dispatch.segments, deferred=dispatch.deferred)
        results = residency.run_layer(self.experts.gate_up, compute, dispatch.receive(coming))
        combined = tokens.expand(dispatch.combine(dispatch.send_back(results), routing.weights))
        whole: Tensor = _GatheredRows.apply(combined, self.layer_context.tensor, sizes) if split else combined
        output = whole.view_as(x)
        return output if shared is None else output + shared

    @property
    def elementwise(self) -> list[ElementwiseSize]:
        """Elementwise operations: tokens are gathered by expert, activated, and summed again."""
        chosen, inner = self.shape.experts_per_token, self.shape.expert_mlp
        moved = ElementwiseSize("add", 2 * chosen * self.shape.hidden)
        shared = self.shared.elementwise if self.shared is not None else []
        return [moved, ElementwiseSize(kind_of(self.experts.activation), chosen * inner, True), *shared]

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the auxiliary losses of the layer."""
        return self.router.terms


class _LocalRows(torch.autograd.Function):
    """Slice of rows [n, h] that all ranks have: rank i has `sizes[i]` rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group, sizes: list[int]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        own: Tensor = rows.split(sizes)[group.rank]
        return own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.all_gather(gradient, sizes=ctx.sizes), None, None


class _GatheredRows(torch.autograd.Function):
    """The rows of all ranks, gathered from slices of `sizes[i]` rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group, sizes: list[int]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return group.all_gather(rows, sizes=sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.split(ctx.sizes)[ctx.group.rank], None, None
