"""What passes between split and whole activations, batch first [b, s, ...], in forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.errors import HpctrainError
from hpctrain.parallel.layer_context import LayerContext


def turned(x: Tensor) -> Tensor:
    """Sequence first of batch first, and the other way round; contiguous."""
    if x.dim() < 3:
        raise HpctrainError(
            "layout.sequence_parallel: expected activations of shape [batch, sequence, features], got "
            f"{list(x.shape)}"
        )
    return x.transpose(0, 1).contiguous()


def entered(groups: LayerContext, x: Tensor) -> Tensor:
    """The whole x, of which a rank has a piece of the sequence under sequence parallelism, for what splits
    features: gradients, which are parts there, are summed.
    """
    result: Tensor = _Entered.apply(x, groups)
    return result


def both_entered(groups: LayerContext, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """As `entered` without pieces, of two, whose gradients are summed in one order on all ranks."""
    result: tuple[Tensor, Tensor] = _BothEntered.apply(x, y, groups)
    return result


def cut(tensor: Group, x: Tensor) -> Tensor:
    """This rank's piece of the sequence of a whole x; gradients of all pieces are gathered."""
    result: Tensor = _Cut.apply(x, tensor)
    return result


def joined(tensor: Group, x: Tensor) -> Tensor:
    """The whole x, of which a rank has a piece of the sequence; gradients, which are whole, are cut."""
    result: Tensor = _Joined.apply(x, tensor)
    return result


def summed(tensor: Group, x: Tensor, *given: Tensor) -> Tensor:
    """The sum of all ranks' x, of which gradients are whole. Backward comes to what was `given` on all ranks,
    even where x does not depend on it.
    """
    result: Tensor = _Summed.apply(x, tensor, *given)
    return result


def whole_features(tensor: Group, x: Tensor, size: int) -> Tensor:
    """All features, `size` of them, of x [..., n], of which every rank has as many; some may be padding.
    Gradients, which are whole on all ranks, are cut.
    """
    result: Tensor = _WholeFeatures.apply(x, tensor, size)
    return result


def own_features(tensor: Group, x: Tensor) -> Tensor:
    """This rank's features of a whole x; gradients of all features are gathered."""
    result: Tensor = _OwnFeatures.apply(x, tensor)
    return result


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: LayerContext) -> Tensor:
        ctx.groups = groups
        return turned(groups.gathered(turned(x))) if groups.sequence_parallel else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        groups: LayerContext = ctx.groups
        if groups.sequence_parallel:
            return turned(groups.sum(turned(gradient))), None
        return groups.sum(gradient.clone(memory_format=torch.contiguous_format)), None


class _BothEntered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, groups: LayerContext) -> tuple[Tensor, Tensor]:
        ctx.groups = groups
        return x.view_as(x), y.view_as(y)

    @staticmethod
    def backward(ctx: Any, of_x: Tensor, of_y: Tensor) -> tuple[Tensor, Tensor, None]:
        of_both = (each.clone(memory_format=torch.contiguous_format) for each in (of_x, of_y))
        x, y = map(ctx.groups.sum, of_both)
        return x, y, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: Group) -> Tensor:
        ctx.tensor = tensor
        return x.chunk(tensor.size, 1)[tensor.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return turned(ctx.tensor.all_gather(turned(gradient))), None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: Group) -> Tensor:
        ctx.tensor = tensor
        return turned(tensor.all_gather(turned(x)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.tensor.size, 1)[ctx.tensor.rank].contiguous(), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: Group, *given: Tensor) -> Tensor:
        ctx.given = len(given)
        return tensor.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None, *(None for _ in range(ctx.given))


class _WholeFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: Group, size: int) -> Tensor:
        ctx.tensor, ctx.own = tensor, x.shape[-1]
        return _all_features(tensor, x)[..., :size].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        first, own = ctx.tensor.rank * ctx.own, gradient.new_zeros(*gradient.shape[:-1], ctx.own)
        there = gradient[..., first : first + ctx.own]
        own[..., : there.shape[-1]] = there
        return own, None, None


class _OwnFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: Group) -> Tensor:
        ctx.tensor = tensor
        return x.chunk(tensor.size, -1)[tensor.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_features(ctx.tensor, gradient), None


def _all_features(tensor: Group, x: Tensor) -> Tensor:
    """The features of all ranks."""
    return tensor.all_gather(x.movedim(-1, 0).contiguous()).movedim(0, -1).contiguous()
