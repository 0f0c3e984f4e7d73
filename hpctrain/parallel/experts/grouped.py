"""The experts of a mixture: two grouped products with an activation between them, mostly a gated one.

Rows lie behind each other by expert. The matrices of all experts of this rank are one tensor, split by expert
over the expert axis and, like Megatron-LM's feed-forward part, by inner features over the expert_tensor axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from hpctrain.deck.activations import ACTIVATIONS, Activation
from hpctrain.parallel.activation_sizes import ActivationSizes, SavedStorage, as_features
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.operations import MatrixSize
from hpctrain.parallel.product_audit.matmul_audit import MatmulAudit
from hpctrain.parallel.shards import Parameter, Shard
from hpctrain.parallel.tensor import MatmulLayer, RowPartition

EXPERT_AXES = frozenset({"expert", "expert_tensor"})

ROW_UNIT = 64
"""Rows of each expert are filled up to a multiple of so many where a CPU multiplies 16-bit numbers: its
library prepares such a product anew for every number of rows, which takes longer than small products do.
"""


def row_unit(dtype: torch.dtype, device: torch.device) -> int:
    """The number whose multiples the rows of an expert are."""
    return ROW_UNIT if device.type == "cpu" and dtype.itemsize == 2 else 1


def count_numbers(numbers: Tensor, length: int) -> Tensor:
    """Return how often each number from 0 to `length` - 1 is among int64 `numbers` [n]: int64 [length].

    It never waits for a device. On a GPU `torch.bincount` does, for the largest number.
    """
    if numbers.is_cpu or numbers.is_meta:
        return torch.bincount(numbers, minlength=length)
    return numbers.new_zeros(length).scatter_add_(0, numbers, torch.ones_like(numbers))


@dataclass(frozen=True)
class Segments:
    """Rows behind each other by expert: `counts` [e] int64 of each, filled up to multiples of `unit`.

    What fills up takes part in products, so it must be finite, and zero where weight gradients are summed.
    """

    counts: Tensor
    unit: int

    @cached_property
    def filled(self) -> Tensor:
        """Rows of each expert, filled up: int64 [e]."""
        return -(-self.counts // self.unit) * self.unit

    @cached_property
    def ends(self) -> Tensor:
        """The row behind the last one of each expert, int32 [e]."""
        return self.filled.cumsum(0).int()

    @cached_property
    def places(self) -> Tensor:
        """Where each of the rows themselves lies among the filled ones: int64 [rows]."""
        count = self.counts
        gaps = (self.filled.cumsum(0) - self.filled) - (count.cumsum(0) - count)
        index = torch.arange(int(count.sum()), device=count.device)
        return index + gaps.repeat_interleave(count)

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """Every expert that has rows, and which. Waits for the device."""
        start = 0
        for expert, rows in enumerate(self.filled.tolist()):
            if rows:
                yield expert, slice(start, start + rows)
            start += rows


def grouped_product(inputs: Tensor, matrices: Tensor, segments: Segments) -> Tensor:
    """[m, k] times each row's own one of the `matrices` [e, n, k], transposed: [m, n]."""
    if len(inputs) and not inputs.is_cpu:
        return functional.grouped_mm(inputs, matrices.transpose(1, 2), offs=segments.ends)
    outputs = inputs.new_empty(len(inputs), matrices.shape[1])
    if not len(inputs):
        return outputs
    for expert, rows in segments:
        torch.mm(inputs[rows], matrices[expert].t(), out=outputs[rows])
    return outputs


def add_grouped_gradient(
    output_gradient: Tensor,
    inputs: Tensor,
    weight: Parameter,
    segments: Segments,
    audit: MatmulAudit | None = None,
) -> None:
    """gradient [e, n, k] += of each expert's rows output_gradient [m, n]^T inputs [m, k]; told as added."""
    if not weight.requires_grad:
        return
    first = weight.gradient_to_overwrite()
    gradient = weight.gradient if first is None else first
    assert gradient is not None, f"{weight.shard.name} has no gradient buffer"
    into = gradient.view(len(gradient), -1, inputs.shape[1])
    if audit is not None and audit.active:
        audit.adding_grouped(weight, output_gradient, inputs, into, segments, first is not None)
    if not len(inputs):
        if first is not None:
            into.zero_()
    elif not inputs.is_cpu:
        product = functional.grouped_mm(output_gradient.t(), inputs, offs=segments.ends)
        # Kernels may leave the memory of an expert without rows as it was.
        product.masked_fill_((segments.counts == 0).view(-1, 1, 1), 0.0)
        into.add_(product) if first is None else into.copy_(product)
    else:
        if first is not None:
            into.zero_()
        for expert, rows in segments:
            left, right = output_gradient[rows].t(), inputs[rows]
            if left.dtype == into.dtype:
                into[expert].addmm_(left, right)
            else:
                into[expert].add_(left @ right)
    weight.added()


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of a mixture.

    Attributes:
        count: Experts.
        chosen: Experts that each token goes to.
        hidden: Features of a token.
        inner: Features of a token within an expert.
    """

    count: int
    chosen: int
    hidden: int
    inner: int


class Experts(MatmulLayer):
    """Rows [m, h] by expert -> the same, of the features that this rank has: a part of a sum over the
    expert_tensor axis.

    `name`.gate_up.weight is [E, 2, f, h], gates first, or `name`.up.weight [E, f, h] where the `activation`
    has no gate; `name`.down.weight is [E, h, f]. `capacity`, if any, is how much of an even load each expert
    takes.
    """

    def __init__(
        self,
        name: str,
        sizes: ExpertSizes,
        groups: LayerContext,
        capacity: float | None = None,
        activation: Activation = ACTIVATIONS["swiglu"],
    ) -> None:
        super().__init__()
        self.groups, self.chosen, self.activation = groups, sizes.chosen, activation
        self.taken = 1.0 if capacity is None else min(1.0, capacity)
        count, hidden, inner = sizes.count, sizes.hidden, sizes.inner
        experts = RowPartition.split(count, groups.expert)
        columns = RowPartition.split(inner, groups.expert_tensor)
        self.local, self.hidden, self.inner = experts.local, hidden, columns.local
        gated = activation.gated
        copies, first = ((2,), (0,)) if gated else ((), ())
        self.gate_up = Parameter(
            Shard(
                f"{name}.{'gate_up' if gated else 'up'}.weight",
                (count, *copies, inner, hidden),
                (experts.start, *first, columns.start, 0),
                (experts.local, *copies, columns.local, hidden),
                split=EXPERT_AXES,
            )
        )
        self.down = Parameter(
            Shard(
                f"{name}.down.weight",
                (count, hidden, inner),
                (experts.start, 0, columns.start),
                (experts.local, hidden, columns.local),
                split=EXPERT_AXES,
            ),
            initial="residual",
        )

    @property
    def matrices(self) -> list[MatrixSize]:
        """See MatmulLayer: gates with what they multiply, and what contracts."""
        count, hidden, inner = self.down.shard.shape
        return [
            MatrixSize(self.activation.input_projections * inner, hidden, "outputs", self.chosen, count),
            MatrixSize(hidden, inner, "inputs", self.chosen, count),
        ]

    @property
    def expanded_features(self) -> int:
        """Features of a row between the two products on this rank."""
        return self.activation.input_projections * self.inner

    @property
    @override
    def late(self) -> list[Parameter]:
        return [self.gate_up, self.down]

    def copies(self, at: ActivationSizes) -> int:
        """Rows that leave this rank for experts, where all have as many."""
        tensor = self.groups.tensor
        return int(self.groups.row_sizes(at.tokens)[tensor.rank] * self.chosen * self.taken)

    def rows(self, at: ActivationSizes) -> int:
        """Rows of this rank's experts, filled up, where all have as many."""
        rows = self.copies(at) * self.groups.expert_tensor.size
        unit = ROW_UNIT if at.itemsize == 2 and not at.gpu else 1
        return rows if unit == 1 else self.local * (-(-rows // (self.local * unit)) * unit)

    def saved(self, at: ActivationSizes) -> list[SavedStorage]:
        """The rows, and gates with what they multiply."""
        sizes = (self.hidden, self.expanded_features)
        return [SavedStorage(self.rows(at) * size * at.itemsize, at.itemsize) for size in sizes]

    def waiting(self, at: ActivationSizes) -> int:
        """See MatmulLayer: the rows, gates and what they multiply, and the gradients of both products."""
        return self.rows(at) * 2 * (self.hidden + self.expanded_features) * at.itemsize

    def multiplied(self, rows: Tensor, weight: Parameter, segments: Segments, turned: bool = False) -> Tensor:
        """Each row [m, k] times its own one of a weight's matrices [e, n, k], transposed unless `turned`."""
        matrices, audit = _matrices(weight), self.groups.audit
        output = grouped_product(rows, matrices.transpose(1, 2) if turned else matrices, segments)
        if audit is not None and audit.active:
            audit.grouped_product(weight, rows, matrices, output, segments, turned)
        return output

    def forward(self, rows: Tensor, segments: Segments, later: list[Callable[[], None]]) -> Tensor:
        """Of `rows` by `segments`. Backward puts what computes weight gradients, unless these are held back
        anyway, into `later`, for whoever has to wait for something soon.
        """
        result: Tensor = _Experts.apply(rows, self, segments, later, self.gate_up, self.down)
        return result


class _Experts(torch.autograd.Function):
    """Keeps the rows and the first product's result; the activation is computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        experts: Experts,
        segments: Segments,
        later: list[Callable[[], None]],
        *_: Tensor,
    ) -> Tensor:
        ctx.experts, ctx.segments, ctx.later = experts, segments, later
        inner = experts.multiplied(rows, experts.gate_up, segments)
        ctx.save_for_backward(as_features(rows), as_features(inner))
        return experts.multiplied(_activated(inner, experts.activation), experts.down, segments)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        experts: Experts = ctx.experts
        segments: Segments = ctx.segments
        rows, inner = (saved[0, 0] for saved in ctx.saved_tensors)
        output_gradient = output_gradient.contiguous()
        activated_gradient = experts.multiplied(output_gradient, experts.down, segments, turned=True)
        inner_gradient = _activation_gradient(inner, activated_gradient, experts.activation)
        del activated_gradient
        rows_gradient = None
        if ctx.needs_input_grad[0]:
            rows_gradient = experts.multiplied(inner_gradient, experts.gate_up, segments, turned=True)

        def compute() -> None:
            audit = experts.groups.audit
            add_grouped_gradient(
                output_gradient, _activated(inner, experts.activation), experts.down, segments, audit
            )
            add_grouped_gradient(inner_gradient, rows, experts.gate_up, segments, audit)

        queue = experts.groups.weight_gradients
        if queue.deferring:
            queue.submit(compute, output_gradient, inner, inner_gradient, rows)
        else:
            ctx.later.append(compute)
        return (rows_gradient, *(None for _ in ctx.needs_input_grad[1:]))


def _matrices(weight: Parameter) -> Tensor:
    """One matrix of each expert: [e, n, k]."""
    return weight.detach().view(len(weight), -1, weight.shape[-1])


def _activated(inner: Tensor, activation: Activation) -> Tensor:
    """Return [m, f] of what expands: [m, f], or gates and their factors side by side, [m, 2 f]."""
    if not activation.gated:
        return activation.function.value(inner)
    gate, up = inner.chunk(2, dim=1)
    return activation.function.value(gate).mul_(up)


def _activation_gradient(inner: Tensor, gradient: Tensor, activation: Activation) -> Tensor:
    """Return the gradient with respect to `inner` where that of what is activated is `gradient` [m, f]."""
    function, result = activation.function, torch.empty_like(inner)
    if not activation.gated:
        function.gradient(gradient, inner, result)
        return result
    gate, up = inner.chunk(2, dim=1)
    gate_gradient, up_gradient = result.chunk(2, dim=1)
    torch.mul(gradient, function.value(gate), out=up_gradient)
    function.gradient(gradient * up, gate, gate_gradient)
    return result


def compute_later(later: Sequence[Callable[[], None]]) -> None:
    """Compute what backward put off, outside autograd."""
    with torch.no_grad():
        for compute in later:
            compute()
