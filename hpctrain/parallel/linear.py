"""Linear layers split by columns or rows over the tensor axis (Megatron-LM, arXiv 1909.08053).

Activations are sequence first, [s, b, features], so that pieces of a sequence are contiguous.
One autograd function owns the backward pass of both layers: it starts the reduction of the input
gradient before it computes the weight gradient, and adds the weight gradient straight into the
bucket's fp32 buffer. Under sequence parallelism (arXiv 2205.05198) the gathered input is not kept
for backward but gathered again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.comm.group import Group
from hpctrain.parallel.groups import LayerGroups
from hpctrain.parallel.product import Product, gradient_of, joined
from hpctrain.parallel.products import make_product
from hpctrain.parallel.saved import Saving, total
from hpctrain.parallel.shard import Initial, Parameter, Shard


@dataclass(frozen=True)
class Rows:
    """One rank's rows `start .. start + local` of `size` output features.

    Where there are fewer units (heads) than ranks, `copies` neighbouring ranks hold the same rows.
    """

    size: int
    start: int
    local: int
    copies: int = 1

    @staticmethod
    def split(size: int, group: Group, unit: int = 1) -> Rows:
        """Split `size` features, made of units of `unit`, over the ranks of `group`."""
        units, ranks = size // unit, group.size
        if units % ranks == 0:
            local = size // ranks
            return Rows(size, group.rank * local, local)
        assert ranks % units == 0, (size, unit, ranks)
        copies = ranks // units
        return Rows(size, group.rank // copies * unit, unit, copies)


def rows_shard(name: str, rows: Rows, others: tuple[int, ...]) -> Shard:
    """The Shard of a tensor [rows, *others] split by rows."""
    return Shard(
        name,
        (rows.size, *others),
        (rows.start, *(0 for _ in others)),
        (rows.local, *others),
        split=frozenset({"tensor"}),
        partial=frozenset({"tensor"}) if rows.copies > 1 else frozenset(),
        copies=rows.copies,
    )


class Multiplying(nn.Module, ABC):
    """What multiplies activations with matrices, and may compute these matrices' gradients later."""

    @property
    @abstractmethod
    def elements(self) -> int:
        """Elements of the whole matrices with which a token is multiplied."""

    @property
    def idle_elements(self) -> int:
        """Elements of others, of which a token is not multiplied with these."""
        return 0

    @property
    @abstractmethod
    def late(self) -> list[Parameter]:
        """The parameters whose gradients wait in the queue of weight gradients."""

    @abstractmethod
    def waiting(self, at: Saving) -> int:
        """Bytes of input and output gradient, which weight gradients hold that are computed later."""


class SplitLinear(Multiplying):
    """What both layers share: fused weights and biases, and the weight-gradient computation."""

    def __init__(self, groups: LayerGroups) -> None:
        super().__init__()
        self.groups = groups
        self.weights: list[Parameter] = []
        self.product: Product
        self.biases: list[Parameter] = []

    def declare(self, weight: Shard, bias: Shard | None, initial: Initial = "normal") -> None:
        """Add one weight [n, k] and, if any, its bias [n]; several are fused along n."""
        index = len(self.weights)
        self.weights.append(Parameter(weight, initial=initial))
        self.register_parameter(f"weight{index}", self.weights[-1])
        if not index:
            self.product = make_product(self.weights, self.groups)
        if bias is not None:
            self.biases.append(Parameter(bias, decayed=False, initial="zeros"))
            self.register_parameter(f"bias{index}", self.biases[-1])

    def bias(self) -> Tensor | None:
        """All biases as one vector [n], if there are any."""
        return joined([parameter.detach() for parameter in self.biases]) if self.biases else None

    @property
    def elements(self) -> int:
        """See Multiplying."""
        return sum(prod(weight.shard.shape) for weight in self.weights)

    @property
    def late(self) -> list[Parameter]:
        """See Multiplying."""
        return self.weights

    def _add_gradients(self, output_gradient: Tensor, inputs: Tensor) -> None:
        if self.weights[0].requires_grad:
            self.product.add_weight_gradient(output_gradient, inputs)
            for parameter in self.weights:
                parameter.added()

    def _add_bias_gradients(self, output_gradient: Tensor) -> None:
        """[n] += output_gradient [..., n] summed over all but the last dim, in fp32, in its own type."""
        if self.biases and self.biases[0].requires_grad:
            gradient = joined([gradient_of(bias) for bias in self.biases])
            gradient.add_(output_gradient.reshape(-1, output_gradient.shape[-1]).sum(0))
            for parameter in self.biases:
                parameter.added()


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: ColumnLinear, *_: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer.product.forward(layer.groups.gathered(x), layer.bias())

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer: ColumnLinear = ctx.layer
        groups, tensor = layer.groups, layer.groups.tensor
        (x,) = ctx.saved_tensors
        output_gradient = output_gradient.contiguous()
        deferred = groups.weight_gradients.deferring
        gathering = tensor.start_all_gather(x) if groups.sequence_parallel and not deferred else None
        summing = None
        if ctx.needs_input_grad[0]:
            summing = groups.start_sum(layer.product.input_gradient(output_gradient))

        def compute() -> None:
            whole = groups.gathered(x) if gathering is None else gathering.wait()
            layer._add_gradients(output_gradient, whole)
            layer._add_bias_gradients(output_gradient)

        groups.weight_gradients.submit(compute, x, output_gradient)
        input_gradient = None if summing is None else summing.wait()
        return (input_gradient, None, *(None for _ in ctx.needs_input_grad[2:]))


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: RowLinear, *_: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        groups, bias = layer.groups, layer.bias()
        if groups.tensor.size == 1:
            return layer.product.forward(x, bias)
        output = groups.sum(layer.product.forward(x))
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer: RowLinear = ctx.layer
        groups = layer.groups
        (x,) = ctx.saved_tensors
        output_gradient = output_gradient.contiguous()
        layer._add_bias_gradients(output_gradient)
        whole = groups.gathered(output_gradient)
        input_gradient = layer.product.input_gradient(whole) if ctx.needs_input_grad[0] else None
        groups.weight_gradients.submit(lambda: layer._add_gradients(whole, x), whole, x)
        return (input_gradient, None, *(None for _ in ctx.needs_input_grad[2:]))


class ColumnLinear(SplitLinear):
    """Y = X A^T + b with A split by output features: each rank computes its features of Y.

    Several outputs (query, key, value; gate, up) are computed by one product; each keeps its own
    global name `<name>.weight` / `<name>.bias`. Input [s, b, k], replicated over the tensor axis, or
    [s/t, b, k] under sequence parallelism; output [s, b, sum of local features]. `split_sizes` are the
    local features of each output.
    """

    def __init__(
        self, inputs: int, outputs: Sequence[tuple[str, Rows]], bias: bool, groups: LayerGroups
    ) -> None:
        super().__init__(groups)
        self.split_sizes = [rows.local for _, rows in outputs]
        for name, rows in outputs:
            weight = rows_shard(f"{name}.weight", rows, (inputs,))
            self.declare(weight, rows_shard(f"{name}.bias", rows, ()) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """[s or s/t, b, k] -> [s, b, sum of split_sizes]."""
        result: Tensor = _Column.apply(x, self, *self.weights, *self.biases)
        return result

    @property
    def late(self) -> list[Parameter]:
        """See Multiplying."""
        return self.weights + self.biases

    def waiting(self, at: Saving) -> int:
        """See Multiplying."""
        inputs = at.row_features(self.weights[0].shape[1])
        return total((inputs, at.features(sum(self.split_sizes))))


class RowLinear(SplitLinear):
    """Y = X A^T + b with A split by input features, the parts of Y summed over the tensor axis.

    Input [s, b, k/t]; output [s, b, n], whole on every rank, or [s/t, b, n] under sequence
    parallelism. The bias is added once, after the sum.
    """

    def __init__(self, name: str, inputs: int, outputs: int, bias: bool, groups: LayerGroups) -> None:
        super().__init__(groups)
        columns = Rows.split(inputs, groups.tensor)
        self.declare(
            Shard(
                f"{name}.weight",
                (outputs, inputs),
                (0, columns.start),
                (outputs, columns.local),
                split=frozenset({"tensor"}),
            ),
            Shard.whole(f"{name}.bias", (outputs,), partial=groups.sequence_partial) if bias else None,
            "residual",
        )

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, k/t] -> [s or s/t, b, n]."""
        result: Tensor = _Row.apply(x, self, *self.weights, *self.biases)
        return result

    def waiting(self, at: Saving) -> int:
        """See Multiplying."""
        outputs, inputs = self.weights[0].shape
        return total((at.features(inputs), at.features(outputs)))
