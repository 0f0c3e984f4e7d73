"""Grouped products: each row is multiplied with the matrix of its own expert.

Rows are ordered by expert. With 3 experts that have 2, 0 and 1 rows, `Segments` describes rows 0 and 1 of
expert 0 and row 2 of expert 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.parallel.product_check import ProductCheck
from hpctrain.parallel.shards import Parameter, gradient_of, gradients_to_update

ROW_UNIT = 64
"""Multiple to which the rows of each expert are padded where a CPU multiplies 16-bit numbers.

Its library prepares such a product anew for every number of rows, which takes longer than small products.
"""


def row_unit(dtype: torch.dtype, device: torch.device) -> int:
    """Return the multiple to which the rows of each expert are padded."""
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
    """Rows ordered by expert, padded for each expert to a multiple of `unit`.

    Padding is multiplied, too, so it must be finite, and zero where weight gradients are summed.

    Attributes:
        counts: Rows of each expert without padding, int64 [e].
        unit: Multiple to which they are padded.
    """

    counts: Tensor
    unit: int

    @cached_property
    def padded_counts(self) -> Tensor:
        """Rows of each expert with padding, int64 [e]."""
        return -(-self.counts // self.unit) * self.unit

    @cached_property
    def ends(self) -> Tensor:
        """End of the rows of each expert, int32 [e]."""
        return self.padded_counts.cumsum(0).int()

    @cached_property
    def positions(self) -> Tensor:
        """Position of each row among the padded ones, int64 [rows]."""
        count, padded = self.counts, self.padded_counts
        gaps = (padded.cumsum(0) - padded) - (count.cumsum(0) - count)
        index = torch.arange(int(count.sum()), device=count.device)
        return index + gaps.repeat_interleave(count)

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """Yield the number and the rows of every expert that has rows. Waits for the device."""
        start = 0
        for expert, rows in enumerate(self.padded_counts.tolist()):
            if rows:
                yield expert, slice(start, start + rows)
            start += rows


def grouped_product(inputs: Tensor, matrices: Tensor, segments: Segments) -> Tensor:
    """Return each row of inputs [m, k] times the transposed matrix of its expert: [m, n].

    Args:
        inputs: Rows by expert.
        matrices: Matrix of each expert, [e, n, k].
        segments: Rows of each expert.
    """
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
    audit: ProductCheck | None = None,
) -> None:
    """Add the weight gradient of each expert's rows to the gradient buffer, and report the addition.

    Args:
        output_gradient: Gradient of the output, [m, n].
        inputs: Inputs, [m, k].
        weight: Weight of all experts, [e, n, k].
        segments: Rows of each expert.
        audit: Check of products in a step that is checked, else None.
    """
    if not weight.requires_grad:
        return
    (gradient,), overwrite = gradients_to_update([weight])
    into = gradient.view(len(gradient), -1, inputs.shape[1])
    if audit is not None:
        audit.expect_grouped_addition(weight, (output_gradient, inputs), into, segments, overwrite)
    if not len(inputs):
        if overwrite:
            into.zero_()
    elif not inputs.is_cpu:
        product = functional.grouped_mm(output_gradient.t(), inputs, offs=segments.ends)
        # Kernels may leave the memory of an expert without rows as it was.
        product.masked_fill_((segments.counts == 0).view(-1, 1, 1), 0.0)
        into.copy_(product) if overwrite else into.add_(product)
    else:
        if overwrite:
            into.zero_()
        for expert, rows in segments:
            left, right = output_gradient[rows].t(), inputs[rows]
            if left.dtype == into.dtype:
                into[expert].addmm_(left, right)
            else:
                into[expert].add_(left @ right)
    weight.mark_gradient_added()


def add_grouped_bias(outputs: Tensor, bias: Tensor, segments: Segments, columns: slice | None = None) -> None:
    """Add the bias of its expert to each row, in place.

    Args:
        outputs: Rows by expert, [m, n].
        bias: Bias of each expert, [e, columns].
        segments: Rows of each expert.
        columns: Columns of the output to which the bias is added; None for all.
    """
    if not len(outputs):
        return
    target = outputs if columns is None else outputs[:, columns]
    if outputs.is_cpu:
        for expert, rows in segments:
            target[rows].add_(bias[expert])
    else:
        target.add_(bias.repeat_interleave(segments.padded_counts, 0, output_size=len(outputs)))


def add_grouped_bias_gradient(
    output_gradient: Tensor, bias: Parameter, segments: Segments, columns: slice | None = None
) -> None:
    """Add the sum over each expert's rows to the gradient buffer of a bias, and report the addition.

    Args:
        output_gradient: Gradient of the output, [m, n]. Padding is zero.
        bias: Bias of all experts.
        segments: Rows of each expert.
        columns: Columns of the output to which the bias was added; None for all.
    """
    if not bias.requires_grad:
        return
    gradient = gradient_of(bias)
    into = gradient.view(len(gradient), -1)
    source = output_gradient if columns is None else output_gradient[:, columns]
    if output_gradient.is_cpu:
        for expert, rows in segments:
            into[expert].add_(source[rows].sum(0, dtype=into.dtype))
    elif len(output_gradient):
        experts = torch.arange(len(into), device=into.device).repeat_interleave(
            segments.padded_counts, output_size=len(output_gradient)
        )
        into.index_add_(0, experts, source.to(into.dtype))
    bias.mark_gradient_added()
