"""A mixture of experts in place of a block's feed-forward part: each token goes to a few of many experts.

The rows of a rank are split over the tensor axis before they are routed, whether or not the layers around are
split by sequence: every rank of a stage sends other tokens to the experts, which lie on the same ranks in a
folding of their own.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.comm.group import Group
from hpctrain.deck.activations import ACTIVATIONS
from hpctrain.model.feed_forward import FeedForward
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.router import RoutedTokens, Router
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.activation_sizes import ActivationSizes, SavedStorage, total
from hpctrain.parallel.experts.dispatch import Dispatch
from hpctrain.parallel.experts.grouped import Experts, ExpertSizes, row_unit
from hpctrain.parallel.kernels.matmul_kernels import apart_bytes
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import ElementwiseSize, kind_of
from hpctrain.parallel.residency import ParameterResidency


class Mixture(nn.Module):
    """[s or s/t, b, h] -> the same: the weighted sum of a token's experts, and of the shared ones."""

    def __init__(self, name: str, shape: ModelShape, groups: LayerContext) -> None:
        super().__init__()
        self.groups, self.shape = groups, shape
        self.router = Router(f"{name}.router", shape, groups)
        sizes = ExpertSizes(shape.experts, shape.experts_per_token, shape.hidden, shape.expert_mlp)
        activation = ACTIVATIONS[shape.activation]
        self.experts = Experts(f"{name}.experts", sizes, groups, shape.capacity, activation)
        inner = shape.shared_experts * shape.expert_mlp
        # The router keeps what it sees, too.
        self.shared = FeedForward(f"{name}.shared", shape, groups, inner, True) if inner else None

    def forward(self, x: Tensor, inputs: ModelInputs, residency: ParameterResidency) -> Tensor:
        """Route, send, compute, and combine; shared experts compute while tokens travel.

        Padding goes to no expert but the shared ones, and its result is theirs alone.
        """
        groups = self.groups
        sizes = self.groups.row_sizes(inputs.tokens.numel())
        first = sum(sizes[: self.groups.tensor.rank])
        own = slice(first, first + sizes[self.groups.tensor.rank])
        flat = x.flatten(0, 1)
        split = self.groups.tensor.size > 1 and not self.groups.sequence_parallel
        rows = _LocalRows.apply(flat, self.groups.tensor, sizes) if split else flat
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            # Whatever is frozen before or here: who starts an exchange in backward needs who completes it.
            rows = rows if rows.requires_grad else rows.detach().requires_grad_()
        tokens = RoutedTokens.of(inputs, own)
        routing = self.router(rows, tokens, inputs)
        unit = row_unit(rows.dtype, rows.device)
        dispatch = Dispatch(
            routing.experts, routing.kept, self.shape.experts, groups.expert, groups.expert_tensor, unit
        )
        coming = dispatch.send(tokens.select(rows))
        shared = self.shared(x) if self.shared is not None else None
        compute = partial(self.experts, segments=dispatch.segments, later=dispatch.later)
        results = residency.around(self.experts.gate_up, compute, dispatch.receive(coming))
        combined = tokens.expand(dispatch.combine(dispatch.send_back(results), routing.weights))
        whole: Tensor = _GatheredRows.apply(combined, self.groups.tensor, sizes) if split else combined
        output = whole.view_as(x)
        return output if shared is None else output + shared

    @property
    def elementwise(self) -> list[ElementwiseSize]:
        """What is done to rows: they are gathered by expert, activated, and added up again."""
        chosen, inner = self.shape.experts_per_token, self.shape.expert_mlp
        moved = ElementwiseSize("add", 2 * chosen * self.shape.hidden)
        shared = self.shared.elementwise if self.shared is not None else []
        return [moved, ElementwiseSize(kind_of(self.experts.activation), chosen * inner, True), *shared]

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the auxiliary losses of the layer."""
        return self.router.terms

    def results(self, at: ActivationSizes) -> SavedStorage:
        """What comes back from the experts."""
        return SavedStorage(self.experts.copies(at) * self.shape.hidden * at.itemsize, at.itemsize)

    def exchanged(self, at: ActivationSizes) -> int:
        """See Layer."""
        ranks = self.groups.expert.size
        return self.results(at).bytes * (ranks - 1) // ranks

    def saved(self, at: ActivationSizes) -> list[SavedStorage]:
        """What router and experts keep, results, and what the shared experts keep."""
        shared = self.shared.saved(at) if self.shared is not None else []
        return [*self.router.saved(at), *shared, *self.experts.saved(at), self.results(at)]

    def workspace(self, at: ActivationSizes) -> int:
        """See FeedForward: gradients of the experts' rows, between their products and around them."""
        rows = self.experts.rows(at) * at.itemsize
        inner = rows * 2 * (self.experts.expanded_features + self.shape.hidden)
        shared = self.shared.workspace(at) if self.shared is not None else 0
        _, of_expert, *sizes = self.experts.gate_up.shape
        product = apart_bytes(of_expert * prod(sizes), at)
        return max(inner + product, shared)

    def passing(self, at: ActivationSizes) -> tuple[int, int]:
        """See FeedForward: what comes for weight gradients of the experts, less their results."""
        held = self.experts.waiting(at) - total(self.experts.saved(at)) - self.results(at).bytes
        chosen = self.shape.experts_per_token
        weights = 4 * self.groups.row_sizes(at.tokens)[self.groups.tensor.rank] * chosen
        most, left = (
            held - (weights if self.shape.router_normalize else 0),
            held - total(self.router.saved(at)),
        )
        if self.shared is None:
            return most, left - at.row_features(self.shape.hidden).bytes
        shared = self.shared.passing(at)
        return most + shared[0], left + shared[1]


class _LocalRows(torch.autograd.Function):
    """Of rows [n, h] that all ranks of a group have, as many as `sizes` says: this rank's."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group, sizes: list[int]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        own: Tensor = rows.split(sizes)[group.rank]
        return own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.all_gather(gradient, sizes=ctx.sizes), None, None


class _GatheredRows(torch.autograd.Function):
    """The other way round."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group, sizes: list[int]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return group.all_gather(rows, sizes=sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.split(ctx.sizes)[ctx.group.rank], None, None
