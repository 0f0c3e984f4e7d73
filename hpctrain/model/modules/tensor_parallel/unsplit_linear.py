"""Linear layers that no plan splits, computed by hpctrain's matrix products in place.

They use the fastest kernels of this machine, and their weight gradients go directly into buckets, or wait for
the W action of a pipeline schedule. In a backward pass inside the module, such as for a force that is the
gradient of an energy, torch computes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.model.modules.module_call import set_forward
from hpctrain.model.modules.tensor_parallel.parallel_layers import (
    LayerGradientParameter,
    LinearSizes,
    ReplacementLinear,
    has_gradient_hooks,
)
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.tensor import ColumnAutograd


def linear_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of all linear layers that `replace_linear_layers` would replace."""
    for each in module.modules():
        if _linear_sizes(each) is not None:
            yield from each.parameters(recurse=False)


def replace_linear_layers(module: nn.Module, layer_context: LayerContext) -> dict[nn.Module, UnsplitLinear]:
    """Let linear layers whose parameters are all LayerGradientParameters compute as UnsplitLinear, in place.

    Returns:
        The UnsplitLinear of each such layer.
    """
    unsplit_context, layers = layer_context.unsplit(), {}
    for each in module.modules():
        linear = _linear_sizes(each)
        if linear is not None and all(
            isinstance(parameter, LayerGradientParameter) for parameter in each.parameters()
        ):
            layers[each] = UnsplitLinear(each, linear, unsplit_context)
            set_forward(each, layers[each].forward)
    return layers


class UnsplitLinear(ReplacementLinear):
    """Replacement of a linear layer's forward method, which uses the layer's parameters."""

    split = "outputs"

    def __init__(self, module: nn.Module, linear: LinearSizes, layer_context: LayerContext) -> None:
        weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
        assert isinstance(weight, LayerGradientParameter)
        assert bias is None or isinstance(bias, LayerGradientParameter)
        super().__init__(layer_context, [weight], [] if bias is None else [bias], linear)
        self.original_forward = module.forward

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., n] for x [..., k].

        The original forward method computes what hpctrain's products do not support: other dtypes than that
        of the weights, vectors, autocast, torch.compile and torch.func.
        """
        if not self._supports(x):
            output: Tensor = self.original_forward(x)
            return output
        result: Tensor = _UnsplitAutograd.apply(x, self, torch.is_grad_enabled(), *self.weights, *self.biases)
        return result

    def _supports(self, x: Tensor) -> bool:
        return (
            x.dim() > 1
            and x.numel() > 0
            and x.dtype == self.weights[0].dtype
            and x.shape[-1] == self.linear.inputs
            and not torch.is_autocast_enabled(x.device.type)
            and not torch.compiler.is_compiling()
            and not torch._C._are_functorch_transforms_active()
        )

    def on_backward(self) -> None:
        """Do nothing: any backward pass may reach this layer."""


class _UnsplitAutograd(ColumnAutograd):
    """Product of an `UnsplitLinear`, in backward passes of the pipeline or inside the module.

    A backward pass of the pipeline adds gradients of weights to their buffers, as `ColumnAutograd` does. A
    backward pass that the module itself runs returns all gradients to autograd.
    """

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer: UnsplitLinear = ctx.layer
        if layer.layer_context.weight_gradients.running and not torch.is_grad_enabled():
            return ColumnAutograd.backward(ctx, output_gradient)
        (x,), weight = ctx.saved_tensors, layer.weights[0]
        rows, of_rows = x.reshape(-1, x.shape[-1]), output_gradient.reshape(-1, output_gradient.shape[-1])
        matrix = weight.t() if layer.linear.transposed else weight
        needed = ctx.needs_input_grad
        of_input = output_gradient @ matrix if needed[0] else None
        of_others: list[Tensor | None] = [None] * (len(needed) - 3)
        if needed[3]:
            of_others[0] = rows.t() @ of_rows if layer.linear.transposed else of_rows.t() @ rows
        if layer.biases and needed[4]:
            of_others[1] = of_rows.sum(0)
        return of_input, None, None, *of_others


def _linear_sizes(module: nn.Module) -> LinearSizes | None:
    """Return the sizes of a linear layer that can be replaced, or None for other modules."""
    weight = module._parameters.get("weight")  # None for a derived weight, as of weight_norm
    if weight is None or "forward" in vars(module):
        return None
    return None if any(map(has_gradient_hooks, module.parameters(recurse=False))) else LinearSizes.of(module)
