"""Losses of quantization and scales, which layers record in detailed steps, as metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from hpctrain.parallel.fp8.formats import exponents_of
from hpctrain.parallel.fp8.quantize import QuantizedTensor
from hpctrain.parallel.step_statistics import StepStatistics

_COUNTS, _SCALES = "fp8 lost", "fp8 scales"
_KINDS = ("inputs", "weights", "gradients")
_BIAS, _NO_NUMBER = 127, 255
"""Bias of exponents as bytes, and the byte of NaN."""

Row = dict[str, list[str] | list[float] | list[float | None]]


def operand_name(weight: str, kind: str, use: str) -> str:
    """Return the name under which the losses of an operand are recorded.

    Args:
        weight: Name of the product's matrix.
        kind: What is quantized for the product: inputs, weights or gradients.
        use: Name of the product among those of the layer that use this operand.
    """
    return f"{weight}/{kind}/{use}"


def record_loss(
    statistics: StepStatistics,
    name: str,
    matrix: Tensor,
    maxima: Tensor,
    quantized: QuantizedTensor,
    padding: Tensor | None = None,
) -> None:
    """Record how many elements quantization saturates or rounds to zero, and the scales.

    Args:
        statistics: Receives the counts.
        name: Name of the operand, from `operand_name`.
        matrix: What was quantized, [m, k].
        maxima: Maxima that the scales follow from.
        quantized: The quantized matrix.
        padding: Rows that are padding, bool [m, 1], which are all zeros and not counted. None if there are
            none.
    """
    if statistics.is_detailed and matrix.numel():
        counts = count_losses(matrix, quantized)
        if padding is not None:
            counts[2] -= padding.sum() * matrix.shape[1]
        record_counts(statistics, name, counts, maxima, quantized)


def record_counts(
    statistics: StepStatistics, name: str, counts: Tensor, maxima: Tensor, quantized: QuantizedTensor
) -> None:
    """Record counts of `count_losses` and the range of scales of a matrix, if the step is detailed.

    Args:
        statistics: Statistics of the step.
        name: Name of the operand in metrics.
        counts: Saturated, underflowed and all elements of the matrix or of this rank's part, int64 [3].
        maxima: Largest magnitude of each block that has a scale. Blocks with 0 or a non-finite one are left
            out.
        quantized: The matrix in 8 bits, for its scales.
    """
    if not statistics.is_detailed:
        return
    statistics.record_sum(f"{_COUNTS}/{name}", counts)
    used, exponents = (maxima > 0) & maxima.isfinite(), exponents_of(quantized.fp32_scales).int()
    most = [torch.where(used, of, 0).amax() for of in (exponents, _NO_NUMBER - exponents)]
    statistics.record_max(f"{_SCALES}/{name}", torch.stack(most))


def is_count(name: str) -> bool:
    """Return True for the name of counts of elements, to which all ranks with the same matrix add."""
    return name.startswith(f"{_COUNTS}/")


def count_losses(matrix: Tensor, quantized: QuantizedTensor) -> Tensor:
    """Return the numbers of saturated, underflowed and all elements of a matrix [m, k]: int64 [3]."""
    blocks, most = quantized.blocks, quantized.fp32_scales * quantized.form.largest
    bits, count = quantized.values.view(torch.uint8), blocks.conversion_rows(matrix)
    saturated = underflowed = torch.zeros((), dtype=torch.int64, device=matrix.device)
    for first in range(0, len(matrix), count):  # so that temporary tensors are small
        rows = slice(first, first + count)
        row = 0 if blocks.rows is None else first // blocks.rows
        parts = blocks.to_blocks(matrix[rows])
        saturated = saturated + (parts.abs() > most[row : row + len(parts), None, :, None]).sum()
        underflowed = (
            underflowed + matrix[rows].count_nonzero() - bits[rows].bitwise_and(0x7F).count_nonzero()
        )
    return torch.stack((saturated, underflowed, torch.full_like(saturated, matrix.numel())))


def loss_metrics(statistics: Mapping[str, Tensor]) -> Row | None:
    """Return a row of metrics from the reduced statistics of a step, or None if it was not detailed.

    It has lists with a value for each kind of layer in "layers". `inputs_saturated` and `inputs_underflowed`
    are shares of the elements, `inputs_scale_least` and `inputs_scale_largest` exponents of two, None if all
    elements are zero; likewise for weights and gradients.
    """
    counts: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    scales: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    for name, values in statistics.items():
        what, *others = name.split("/")
        if what in {_COUNTS, _SCALES}:
            weight, kind, _ = others
            (counts if what == _COUNTS else scales)[name_without_block(weight), kind].append(values.cpu())
    if not counts:
        return None
    layers = list(dict.fromkeys(layer for layer, _ in counts))
    row: Row = {"layers": layers}
    for kind in _KINDS:
        sums = [torch.stack(counts.get((layer, kind), [torch.zeros(3)])).sum(0) for layer in layers]
        most = [torch.stack(scales.get((layer, kind), [torch.zeros(2)])).amax(0) for layer in layers]
        row[f"{kind}_saturated"] = [float(each[0] / each[2].clamp_min(1)) for each in sums]
        row[f"{kind}_underflowed"] = [float(each[1] / each[2].clamp_min(1)) for each in sums]
        row[f"{kind}_scale_least"] = [
            float(_NO_NUMBER - each[1] - _BIAS) if each[1] else None for each in most
        ]
        row[f"{kind}_scale_largest"] = [float(each[0] - _BIAS) if each[1] else None for each in most]
    return row


def name_without_block(weight: str) -> str:
    """Return the part of a weight's name that the layers of all blocks share, such as "attention.query"."""
    parts = weight.removesuffix(".weight").split(".")
    return ".".join(part for part in parts if not part.isdecimal()).removeprefix("blocks.")
