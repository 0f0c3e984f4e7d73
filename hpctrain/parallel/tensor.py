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
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from hpctrain.comm.group import Group
from hpctrain.deck.sections.adapters import Adapters
from hpctrain.parallel.activation_sizes import ActivationSizes, SavedStorage, total
from hpctrain.parallel.adapter import AdaptedMatrix, LayerAdapters
from hpctrain.parallel.autograd import apply_function
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.matmul import (
    Matmul,
    Operand,
    gradient_of,
    join_neighbors,
    operand_from,
    operand_tensors,
)
from hpctrain.parallel.matmul_choice import make_matmul
from hpctrain.parallel.operations import Cut, MatrixSize
from hpctrain.parallel.shards import Initial, Parameter, Shard


@dataclass(frozen=True)
class RowPartition:
    """One rank's rows `start .. start + local` of `size` output features.

    Where there are fewer units (heads) than ranks, `copies` neighbouring ranks hold the same rows. `unit` is
    that of the Shard.
    """

    size: int
    start: int
    local: int
    copies: int = 1
    unit: int = 1

    @staticmethod
    def split(size: int, group: Group, unit: int = 1) -> RowPartition:
        """Split `size` features, made of units of `unit`, over the ranks of `group`."""
        units, ranks = size // unit, group.size
        if units % ranks == 0:
            local = size // ranks
            return RowPartition(size, group.rank * local, local)
        assert ranks % units == 0, (size, unit, ranks)
        copies = ranks // units
        return RowPartition(size, group.rank // copies * unit, unit, copies)


def rows_shard(name: str, rows: RowPartition, others: tuple[int, ...]) -> Shard:
    """The Shard of a tensor [rows, *others] split by rows."""
    return Shard(
        name,
        (rows.size, *others),
        (rows.start, *(0 for _ in others)),
        (rows.local, *others),
        split=frozenset({"tensor"}),
        partial=frozenset({"tensor"}) if rows.copies > 1 else frozenset(),
        copies=rows.copies,
        unit=rows.unit,
    )


class MatmulLayer(nn.Module, ABC):
    """What multiplies activations with matrices, and may compute these matrices' gradients later."""

    @property
    @abstractmethod
    def matrices(self) -> list[MatrixSize]:
        """Whole."""

    @property
    @abstractmethod
    def late(self) -> list[Parameter]:
        """The parameters whose gradients wait in the queue of weight gradients."""

    @abstractmethod
    def waiting(self, at: ActivationSizes) -> int:
        """Bytes of input and output gradient, which weight gradients hold that are computed later."""


class SplitLinear(MatmulLayer):
    """What both layers share: fused weights and biases, and the weight-gradient computation.

    `shared_input` says that others keep the input for backward, too; `adapter`, if any, adds to the product.
    """

    cut: ClassVar[Cut]

    def __init__(self, groups: LayerContext, shared_input: bool) -> None:
        super().__init__()
        self.groups, self.shared_input = groups, shared_input
        self.adapter: LayerAdapters | None = None
        self.weights: list[Parameter] = []
        self.product: Matmul
        self.biases: list[Parameter] = []

    def declare(self, weight: Shard, bias: Shard | None, initial: Initial = "normal") -> None:
        """Add one weight [n, k] and, if any, its bias [n]; several are fused along n."""
        index = len(self.weights)
        self.weights.append(Parameter(weight, initial=initial))
        self.register_parameter(f"weight{index}", self.weights[-1])
        if not index:
            self.product = make_matmul(self.weights, self.groups)
        if bias is not None:
            self.biases.append(Parameter(bias, decayed=False, initial="zeros"))
            self.register_parameter(f"bias{index}", self.biases[-1])

    def adapt(self, adapters: Adapters | None) -> None:
        """Have adapters of those of its weights, all declared by now, that they are for."""
        if adapters is None:
            return
        places, row = [], 0
        for weight in self.weights:
            rows = weight.shard.local[0]
            if adapters.adapts(weight.shard.name.removesuffix(".weight")):
                places.append(AdaptedMatrix(weight.shard, slice(row, row + rows)))
            row += rows
        if places:
            self.adapter = LayerAdapters(places, self.cut, adapters, self.groups)

    def bias(self) -> Tensor | None:
        """All biases as one vector [n], if there are any."""
        return join_neighbors([parameter.detach() for parameter in self.biases]) if self.biases else None

    @property
    def matrices(self) -> list[MatrixSize]:
        """See MatmulLayer: one, of all that are fused."""
        outputs = sum(weight.shard.shape[0] for weight in self.weights)
        beside = [] if self.adapter is None else self.adapter.matrices
        biased = bool(self.biases)
        return [MatrixSize(outputs, self.weights[0].shard.shape[1], self.cut, biased=biased), *beside]

    @property
    @override
    def late(self) -> list[Parameter]:
        return self.weights + self.adapting

    @property
    def adapting(self) -> list[Parameter]:
        """The parameters of its adapter, if any."""
        return [] if self.adapter is None else self.adapter.weights

    def beside(self, at: ActivationSizes) -> list[SavedStorage]:
        """What its adapter keeps for backward."""
        return [] if self.adapter is None else [self.adapter.saved(at)]

    def _multiply(
        self, x: Tensor, bias: Tensor | None, pieces: Group | None, training: bool
    ) -> tuple[Tensor, Operand, tuple[Tensor, ...]]:
        """The product, what is kept of x, and what its adapter keeps, see Matmul.forward_kept."""
        if self.adapter is None:
            return *self.product.forward_and_save(x, bias, pieces, self.compact(training)), ()
        whole = x if pieces is None else pieces.all_gather(x)
        output = self.product.forward(whole, bias)
        return output, x, (self.adapter.add(output, whole),)

    @property
    def pieces(self) -> Group | None:
        """The ranks whose sequence is split before and after."""
        return self.groups.tensor if self.groups.sequence_parallel else None

    def compact(self, training: bool) -> bool:
        """Whether a product may keep its input in another form for backward: nobody else keeps it."""
        return training and not self.shared_input

    def _kept(self, rows: int, at: ActivationSizes, pieces: Group | None) -> list[SavedStorage]:
        if self.shared_input:
            return Matmul.kept(self.product, rows, at, pieces)
        return self.product.kept(rows, at, pieces)

    def _add_gradients(self, output_gradient: Operand, kept: Operand, inner: Sequence[Tensor]) -> None:
        """`inner` is what is between the factors of its adapter, if any, and the gradient of that."""
        if self.weights[0].requires_grad:
            self.product.add_weight_gradient_of(output_gradient, kept)
            self.added(self.weights)
        if self.adapter is not None:
            assert isinstance(output_gradient, Tensor) and isinstance(kept, Tensor)
            between, gradient = inner
            self.adapter.add_weight_gradients(output_gradient, between, gradient, kept)
            self.added(self.adapter.weights)

    def _pass_inner(self, output_gradient: Operand, input_gradient: Tensor | None) -> tuple[Tensor, ...]:
        """The gradient of what is between the factors of its adapter, if any, whose part of the input's is
        added to that, where there is one.
        """
        if self.adapter is None:
            return ()
        assert isinstance(output_gradient, Tensor)
        inner_gradient = self.adapter.inner_gradient(output_gradient)
        if input_gradient is not None:
            self.adapter.add_input_gradient(input_gradient, inner_gradient)
        return (inner_gradient,)

    def _add_bias_gradients(self, output_gradient: Tensor) -> None:
        """[n] += output_gradient [..., n] summed over all but the last dim, in fp32, in its own type."""
        if self.biases and self.biases[0].requires_grad:
            gradient = join_neighbors([gradient_of(bias) for bias in self.biases])
            gradient.add_(output_gradient.reshape(-1, output_gradient.shape[-1]).sum(0))
            self.added(self.biases)

    def saved_of(self, saved: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Operand]:
        """What a forward pass has saved: of its adapter, if any, and of the input."""
        own = int(self.adapter is not None)
        return saved[:own], operand_from(saved[own:])

    def met(self) -> None:
        """A backward pass has come to it."""

    def added(self, parameters: Sequence[Parameter]) -> None:
        """Tell that one addition to each of their gradients is complete."""
        for parameter in parameters:
            parameter.added()


class ColumnAutograd(torch.autograd.Function):
    """The passes of a ColumnLinear: of its input, itself, whether it is trained, and all its parameters."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, layer: ColumnLinear, training: bool, *_: Tensor) -> Tensor:
        ctx.layer = layer
        output, kept, inner = layer._multiply(x, layer.bias(), layer.pieces, training)
        ctx.save_for_backward(*inner, *operand_tensors(kept))
        return output

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the input; what is of parameters is added to their buffers."""
        layer: ColumnLinear = ctx.layer
        layer.met()
        groups, product, pieces = layer.groups, layer.product, layer.pieces
        inner, kept = layer.saved_of(ctx.saved_tensors)
        output_gradient = output_gradient.contiguous()
        deferred = groups.weight_gradients.deferring
        coming = product.start_gather_saved(kept, pieces) if pieces is not None and not deferred else None
        gradient = product.gather_gradient(output_gradient, None)
        summing, of_input = None, None
        if ctx.needs_input_grad[0]:
            of_input = product.input_gradient_of(gradient).view(*output_gradient.shape[:-1], -1)
        inner = (*inner, *layer._pass_inner(gradient, of_input))
        if of_input is not None:
            summing = groups.start_sum(of_input)

        of_biases = output_gradient if layer.biases else None

        def compute() -> None:
            whole = kept
            if pieces is not None:
                whole = (product.start_gather_saved(kept, pieces, True) if coming is None else coming)()
            layer._add_gradients(gradient, whole, inner)
            if of_biases is not None:
                layer._add_bias_gradients(of_biases)

        others = () if of_biases is None or gradient is of_biases else (of_biases,)
        groups.weight_gradients.submit(
            compute, *operand_tensors(kept), *operand_tensors(gradient), *others, *inner
        )
        input_gradient = None if summing is None else summing.wait()
        return (input_gradient, None, None, *(None for _ in ctx.needs_input_grad[3:]))


class _RowAutograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: RowLinear, training: bool, *_: Tensor) -> Tensor:
        ctx.layer = layer
        groups, bias = layer.groups, layer.bias()
        of_product = bias if groups.tensor.size == 1 else None
        output, kept, inner = layer._multiply(x, of_product, None, training)
        ctx.save_for_backward(*inner, *operand_tensors(kept))
        if groups.tensor.size == 1:
            return output
        output = groups.sum(output)
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer: RowLinear = ctx.layer
        layer.met()
        groups, product = layer.groups, layer.product
        inner, kept = layer.saved_of(ctx.saved_tensors)
        output_gradient = output_gradient.contiguous()
        layer._add_bias_gradients(output_gradient)
        whole, input_gradient = product.gather_gradient(output_gradient, layer.pieces), None
        if ctx.needs_input_grad[0]:
            batch = output_gradient.shape[1:-1]
            of_input = product.input_gradient_of(whole)
            input_gradient = of_input.view(-1, *batch, of_input.shape[-1])
        inner = (*inner, *layer._pass_inner(whole, input_gradient))
        groups.weight_gradients.submit(
            lambda: layer._add_gradients(whole, kept, inner),
            *operand_tensors(whole),
            *operand_tensors(kept),
            *inner,
        )
        return (input_gradient, None, None, *(None for _ in ctx.needs_input_grad[3:]))


class ColumnLinear(SplitLinear):
    """Y = X A^T + b with A split by output features: each rank computes its features of Y.

    Several outputs (query, key, value; gate, up) are computed by one product; each keeps its own
    global name `<name>.weight` / `<name>.bias`. Input [s, b, k], replicated over the tensor axis, or
    [s/t, b, k] under sequence parallelism; output [s, b, sum of local features]. `split_sizes` are the
    local features of each output.
    """

    cut = "outputs"

    def __init__(
        self,
        inputs: int,
        outputs: Sequence[tuple[str, RowPartition]],
        bias: bool,
        groups: LayerContext,
        shared_input: bool = False,
        adapters: Adapters | None = None,
    ) -> None:
        super().__init__(groups, shared_input)
        self.split_sizes = [rows.local for _, rows in outputs]
        for name, rows in outputs:
            weight = rows_shard(f"{name}.weight", rows, (inputs,))
            self.declare(weight, rows_shard(f"{name}.bias", rows, ()) if bias else None)
        self.adapt(adapters)

    def forward(self, x: Tensor) -> Tensor:
        """[s or s/t, b, k] -> [s, b, sum of split_sizes]."""
        parameters = *self.weights, *self.biases, *self.adapting
        result: Tensor = apply_function(ColumnAutograd, x, self, torch.is_grad_enabled(), *parameters)
        return result

    @property
    @override
    def late(self) -> list[Parameter]:
        return self.weights + self.biases + self.adapting

    @override
    def waiting(self, at: ActivationSizes) -> int:
        gradient = self.product.gradient_bytes(at.tokens, at)
        plain = at.features(sum(self.split_sizes)).bytes
        between = 2 * total(self.beside(at))
        return total(self.kept(at)) + gradient + (plain if self.biases and gradient < plain else 0) + between

    def kept(self, at: ActivationSizes) -> list[SavedStorage]:
        """What is kept of the input for the weights' gradients."""
        return self._kept(at.rows, at, self.pieces)


class RowLinear(SplitLinear):
    """Y = X A^T + b with A split by input features, the parts of Y summed over the tensor axis.

    Input [s, b, k/t]; output [s, b, n], whole on every rank, or [s/t, b, n] under sequence
    parallelism. The bias is added once, after the sum.
    """

    cut = "inputs"

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        bias: bool,
        groups: LayerContext,
        shared_input: bool = False,
        adapters: Adapters | None = None,
    ) -> None:
        super().__init__(groups, shared_input)
        columns = RowPartition.split(inputs, groups.tensor)
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
        self.adapt(adapters)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, k/t] -> [s or s/t, b, n]."""
        parameters = *self.weights, *self.biases, *self.adapting
        result: Tensor = apply_function(_RowAutograd, x, self, torch.is_grad_enabled(), *parameters)
        return result

    @override
    def waiting(self, at: ActivationSizes) -> int:
        between = 2 * total(self.beside(at))
        return total(self.kept(at)) + self.product.gradient_bytes(at.tokens, at) + between

    def kept(self, at: ActivationSizes) -> list[SavedStorage]:
        """Return the tensors that autograd saves, as for a `ColumnLinear`."""
        return self._kept(at.tokens, at, None)
