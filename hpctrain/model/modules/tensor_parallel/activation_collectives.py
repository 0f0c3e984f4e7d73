"""Autograd functions between split and complete activations, batch first [b, s, ...].

The backward pass of each function makes the opposite exchange:

| function | forward pass | backward pass |
|---|---|---|
| `enter_split` | gathers sequences, with sequence parallelism | sums the ranks' gradients |
| `scatter_sequence` | this rank's slice of a sequence | gathers the slices' gradients |
| `gather_sequence` | gathers slices of a sequence | this rank's slice of the gradient |
| `split_features` | this rank's slice of the features | gathers the slices' gradients |
| `gather_features` | gathers slices of the features | this rank's slice of the gradient |
| `scatter_rows` | this rank's slice of the rows | gathers the slices' gradients |
| `gather_rows` | gathers slices of the rows | this rank's slice of the gradient |
| `enter_split_all` | no exchange | sums the ranks' gradients of several tensors |
| `sum_gradient_of_last` | no exchange | sums the ranks' gradients of some features |
| `sum_results` | sums the ranks' tensors | no exchange |

All of them are collective over the tensor ranks, in both passes. Where a backward pass takes a slice, the
gradient is complete on all ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.errors import HpctrainError
from hpctrain.parallel.backward.autograd import exchange
from hpctrain.parallel.layer_context import LayerContext


def enter_split(layer_context: LayerContext, x: Tensor) -> Tensor:
    """Return the complete x [b, s, ...] for a layer that splits features.

    Args:
        layer_context: Context of the layer.
        x: Complete activations, or this rank's slice [b, s/t, ...] under sequence parallelism.
    """
    if not layer_context.sequence_parallel:
        return exchange(x, lambda x: x.view_as(x), lambda gradient: layer_context.tensor_sum(_copy(gradient)))
    return exchange(
        x,
        lambda x: transpose_sequence(layer_context.gather_sequence(transpose_sequence(x))),
        lambda gradient: transpose_sequence(layer_context.tensor_sum(transpose_sequence(gradient))),
    )


def scatter_sequence(tensor: Group, x: Tensor) -> Tensor:
    """Return this rank's slice [b, s/t, ...] of a complete x [b, s, ...]."""
    return exchange(x, partial(_local_slice, tensor, 1), partial(_gather_sequence, tensor))


def gather_sequence(tensor: Group, x: Tensor) -> Tensor:
    """Return the complete x [b, s, ...] from the ranks' slices [b, s/t, ...]."""
    return exchange(x, partial(_gather_sequence, tensor), partial(_local_slice, tensor, 1))


def split_features(tensor: Group, x: Tensor) -> Tensor:
    """Return this rank's slice [..., n/t] of the features of a complete x [..., n]."""
    return exchange(x, partial(_local_slice, tensor, -1), partial(_gather_features, tensor))


def gather_features(tensor: Group, x: Tensor, size: int) -> Tensor:
    """Return all features [..., size] from the ranks' slices x [..., n]. The last slice may be padded."""
    local = x.shape[-1]

    def local_slice(gradient: Tensor) -> Tensor:
        padded = gradient.new_zeros(*gradient.shape[:-1], local)
        features = gradient[..., tensor.rank * local : (tensor.rank + 1) * local]
        padded[..., : features.shape[-1]] = features
        return padded

    return exchange(x, lambda x: _gather_features(tensor, x)[..., :size].contiguous(), local_slice)


def scatter_rows(tensor: Group, x: Tensor) -> Tensor:
    """Return this rank's slice [n/t, ...] of a complete x [n, ...]."""
    return exchange(
        x, partial(_local_slice, tensor, 0), lambda gradient: tensor.all_gather(gradient.contiguous())
    )


def gather_rows(tensor: Group, x: Tensor) -> Tensor:
    """Return the complete x [n, ...] from the ranks' slices [n/t, ...]."""
    return exchange(x, lambda x: tensor.all_gather(x.contiguous()), partial(_local_slice, tensor, 0))


def enter_split_all(layer_context: LayerContext, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return complete tensors for layers that are split. All ranks sum their gradients in this order."""
    result: tuple[Tensor, ...] = _EnterSplitAll.apply(layer_context, *tensors)
    return result


def sum_gradient_of_last(layer_context: LayerContext, features: int, x: Tensor) -> Tensor:
    """Return a complete x [..., n] whose last features [..., n - features:] enter split layers.

    The ranks sum the gradient of these features. That of the others is complete.
    """

    def sum_last(gradient: Tensor) -> Tensor:
        result = _copy(gradient)
        result[..., -features:] = layer_context.tensor_sum(_copy(gradient[..., -features:]))
        return result

    return exchange(x, lambda x: x.view_as(x), sum_last)


def sum_results(tensor: Group, x: Tensor, *dependencies: Tensor) -> Tensor:
    """Return the sum of all ranks' x, whose gradient is complete on each rank.

    Backward reaches `dependencies` on all ranks, even if x does not depend on them there.
    """
    result: Tensor = _SumResults.apply(x, tensor, *dependencies)
    return result


def transpose_sequence(x: Tensor) -> Tensor:
    """Return x [b, s, ...] as [s, b, ...], or the other way round, contiguous."""
    if x.dim() < 3:
        raise HpctrainError(
            "layout.sequence_parallel: expected activations of shape [batch, sequence, features], got "
            f"{list(x.shape)}"
        )
    return x.transpose(0, 1).contiguous()


class _EnterSplitAll(torch.autograd.Function):
    """Inputs of a split layer: identity in forward, the sum over tensor ranks in backward."""

    @staticmethod
    def forward(ctx: Any, layer_context: LayerContext, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.layer_context = layer_context
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(ctx.layer_context.tensor_sum(_copy(gradient)) for gradient in gradients)


class _SumResults(torch.autograd.Function):
    """Sum over tensor ranks in forward, identity in backward, which also reaches `dependencies`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: Group, *dependencies: Tensor) -> Tensor:
        ctx.dependencies = len(dependencies)
        return tensor.all_reduce(_copy(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None, *(None for _ in range(ctx.dependencies))


def _copy(x: Tensor) -> Tensor:
    """Return a contiguous copy, which a sum over ranks may overwrite."""
    return x.clone(memory_format=torch.contiguous_format)


def _local_slice(tensor: Group, dim: int, x: Tensor) -> Tensor:
    return x.chunk(tensor.size, dim)[tensor.rank].contiguous()


def _gather_sequence(tensor: Group, x: Tensor) -> Tensor:
    return transpose_sequence(tensor.all_gather(transpose_sequence(x)))


def _gather_features(tensor: Group, x: Tensor) -> Tensor:
    return tensor.all_gather(x.movedim(-1, 0).contiguous()).movedim(0, -1).contiguous()
