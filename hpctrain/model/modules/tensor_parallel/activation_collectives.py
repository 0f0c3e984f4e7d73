"""Autograd functions between split and complete activations, batch first [b, s, ...]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.errors import HpctrainError
from hpctrain.parallel.layer_context import LayerContext


def transpose_sequence(x: Tensor) -> Tensor:
    """Return x with the batch and sequence dimensions exchanged, contiguous."""
    if x.dim() < 3:
        raise HpctrainError(
            "layout.sequence_parallel: expected activations of shape [batch, sequence, features], got "
            f"{list(x.shape)}"
        )
    return x.transpose(0, 1).contiguous()


def enter_split(layer_context: LayerContext, x: Tensor) -> Tensor:
    """Return the complete x for a layer that splits features.

    Under sequence parallelism, x is a slice of the sequence and is gathered. Backward sums the ranks'
    gradients.
    """
    result: Tensor = _EnterSplit.apply(x, layer_context)
    return result


def enter_split_pair(layer_context: LayerContext, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return two complete tensors for layers that are split. Backward sums their gradients in order."""
    result: tuple[Tensor, Tensor] = _EnterSplitPair.apply(x, y, layer_context)
    return result


def scatter_sequence(tensor: Group, x: Tensor) -> Tensor:
    """Return this rank's slice of the sequence of a complete x. Backward gathers the slices' gradients."""
    result: Tensor = _ScatterSequence.apply(x, tensor)
    return result


def gather_sequence(tensor: Group, x: Tensor) -> Tensor:
    """Return the complete x from slices of the sequence. Backward slices the gradient, which is complete."""
    result: Tensor = _GatherSequence.apply(x, tensor)
    return result


def sum_results(tensor: Group, x: Tensor, *dependencies: Tensor) -> Tensor:
    """Return the sum of all ranks' x, whose gradient is complete on each rank.

    Backward reaches `dependencies` on all ranks, even if x does not depend on them there.
    """
    result: Tensor = _SumResults.apply(x, tensor, *dependencies)
    return result


def gather_features(tensor: Group, x: Tensor, size: int) -> Tensor:
    """Return all `size` features from equal slices x [..., n] of all ranks, of which the last may be padded.

    Backward slices the gradient, which is complete on all ranks.
    """
    result: Tensor = _GatherFeatures.apply(x, tensor, size)
    return result


def split_features(tensor: Group, x: Tensor) -> Tensor:
    """Return this rank's slice of the features of a complete x. Backward gathers the slices' gradients."""
    result: Tensor = _SplitFeatures.apply(x, tensor)
    return result


class _EnterSplit(torch.autograd.Function):
    """Input of a split layer: the full sequence in forward, the sum over tensor ranks in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer_context: LayerContext) -> Tensor:
        ctx.layer_context = layer_context
        if not layer_context.sequence_parallel:
            return x.view_as(x)
        return transpose_sequence(layer_context.gather_sequence(transpose_sequence(x)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        layer_context: LayerContext = ctx.layer_context
        if layer_context.sequence_parallel:
            return transpose_sequence(layer_context.reduce_output(transpose_sequence(gradient))), None
        return layer_context.reduce_output(gradient.clone(memory_format=torch.contiguous_format)), None


class _EnterSplitPair(torch.autograd.Function):
    """Two inputs of a split layer: identity in forward, the sum over tensor ranks in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, layer_context: LayerContext) -> tuple[Tensor, Tensor]:
        ctx.layer_context = layer_context
        return x.view_as(x), y.view_as(y)

    @staticmethod
    def backward(ctx: Any, of_x: Tensor, of_y: Tensor) -> tuple[Tensor, Tensor, None]:
        of_both = (each.clone(memory_format=torch.contiguous_format) for each in (of_x, of_y))
        x, y = map(ctx.layer_context.reduce_output, of_both)
        return x, y, None


class _ScatterSequence(torch.autograd.Function):
    """Piece of this rank of a sequence [b, s, ...] in forward, all pieces in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: Group) -> Tensor:
        ctx.tensor = tensor
        return x.chunk(tensor.size, 1)[tensor.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return transpose_sequence(ctx.tensor.all_gather(transpose_sequence(gradient))), None


class _GatherSequence(torch.autograd.Function):
    """Gather of the pieces of a sequence [b, s/t, ...] in forward, this rank's piece in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: Group) -> Tensor:
        ctx.tensor = tensor
        return transpose_sequence(tensor.all_gather(transpose_sequence(x)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.tensor.size, 1)[ctx.tensor.rank].contiguous(), None


class _SumResults(torch.autograd.Function):
    """Sum over tensor ranks in forward, identity in backward, which also reaches `dependencies`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: Group, *dependencies: Tensor) -> Tensor:
        ctx.dependencies = len(dependencies)
        return tensor.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None, *(None for _ in range(ctx.dependencies))


class _GatherFeatures(torch.autograd.Function):
    """Features of all tensor ranks in forward, this rank's features in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: Group, size: int) -> Tensor:
        ctx.tensor, ctx.local = tensor, x.shape[-1]
        return _gather_last_dim(tensor, x)[..., :size].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        first, local = ctx.tensor.rank * ctx.local, gradient.new_zeros(*gradient.shape[:-1], ctx.local)
        there = gradient[..., first : first + ctx.local]
        local[..., : there.shape[-1]] = there
        return local, None, None


class _SplitFeatures(torch.autograd.Function):
    """Features of this rank in forward, those of all tensor ranks in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: Group) -> Tensor:
        ctx.tensor = tensor
        return x.chunk(tensor.size, -1)[tensor.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gather_last_dim(ctx.tensor, gradient), None


def _gather_last_dim(tensor: Group, x: Tensor) -> Tensor:
    """Return the features of all ranks."""
    return tensor.all_gather(x.movedim(-1, 0).contiguous()).movedim(0, -1).contiguous()
