"""Linear layers that no plan names, computed by our products where they stand: by the kernels that are
quickest here, with gradients of weights that go straight into buckets, or wait for their W.

In a backward pass that is not the run's, as of a force that a module finds as the gradient of an energy, they
are what torch makes of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.comm.ledger import Ledger
from hpctrain.comm.planned import planned_group
from hpctrain.model.modules.tensor_parallel.parallel_layers import (
    LateParameter,
    Linear,
    is_hooked,
    take_parameters,
)
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.tensor import ColumnAutograd, ColumnLinear, SplitLinear


def multiplied(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of all linear layers that would be computed so."""
    for each in module.modules():
        if _linear(each) is not None:
            yield from each.parameters(recurse=False)


def compute_whole(module: nn.Module, groups: LayerContext) -> dict[nn.Module, WholeLinear]:
    """Have the linear layers that are here, of parameters that are LateParameters, compute so; what of."""
    alone = planned_group(("tensor",), 0, 1, Ledger())
    own_groups = replace(groups, tensor=alone, sequence_parallel=False)
    made = {}
    for each in module.modules():
        linear = _linear(each)
        if linear is not None and all(isinstance(own, LateParameter) for own in each.parameters()):
            made[each] = WholeLinear(each, linear, own_groups)
            # Who looks for its forward method finds this one first.
            vars(each)["forward"] = made[each].forward
    return made


def layers_in(modules: Iterable[nn.Module], whole: Mapping[nn.Module, WholeLinear]) -> list[SplitLinear]:
    """The layers that compute by our products among modules."""
    found = (each if isinstance(each, SplitLinear) else whole.get(each) for each in modules)
    return [each for each in found if each is not None]


class WholeLinear(ColumnLinear):
    """Computes in the place of a linear layer, with its parameters."""

    def __init__(self, module: nn.Module, linear: Linear, groups: LayerContext) -> None:
        SplitLinear.__init__(self, groups, shared_input=False)
        weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
        assert isinstance(weight, LateParameter) and (bias is None or isinstance(bias, LateParameter))
        take_parameters(self, [weight], [] if bias is None else [bias], linear)
        self.split_sizes, self.linear, self.plain = [linear.outputs], linear, module.forward

    def forward(self, x: Tensor) -> Tensor:
        """[..., k] -> [..., n]; what only torch can do is done by it."""
        if not self._takes(x):
            plain: Tensor = self.plain(x)
            return plain
        result: Tensor = _UnsplitAutograd.apply(x, self, torch.is_grad_enabled(), *self.weights, *self.biases)
        return result

    def _takes(self, x: Tensor) -> bool:
        return (
            x.dim() > 1
            and x.numel() > 0
            and x.dtype == self.weights[0].dtype
            and x.shape[-1] == self.linear.inputs
            and not torch.is_autocast_enabled(x.device.type)
            and not torch.compiler.is_compiling()
            and not torch._C._are_functorch_transforms_active()
        )

    def met(self) -> None:
        """Any pass may."""

    def added(self, parameters: Collection[Any]) -> None:
        """Autograd tells."""


class _UnsplitAutograd(ColumnAutograd):
    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer: WholeLinear = ctx.layer
        if layer.groups.weight_gradients.running and not torch.is_grad_enabled():
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


def _linear(module: nn.Module) -> Linear | None:
    """The sizes of a module that is a linear layer and nothing else."""
    weight = module._parameters.get("weight")  # what is made of others, as by weight_norm, is no parameter
    if weight is None or "forward" in vars(module):
        return None
    return None if any(map(is_hooked, module.parameters(recurse=False))) else Linear.of(module)
