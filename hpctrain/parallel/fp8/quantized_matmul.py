"""Matrix products of a layer in 8 bits, with scales of current maxima.

For Y = X W^T the inputs X [m, k] and the weights W [n, k] are quantized to E4M3, multiplied, and the result
is scaled back. The two gradients do the same with dY [m, n] in E5M2:

    forward          Q(X)  Q(W)^T
    input gradient   Q(dY) Q(W^T)^T
    weight gradient  Q(dY^T) Q(X^T)^T

Where several ranks hold parts of what shares a scale, the scale comes from the maximum over these ranks
(collective): context ranks have tokens of their own, tensor ranks features. So no result depends on the
layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.group import Group
from hpctrain.parallel.fp8.formats import E4M3, reducible_maximum
from hpctrain.parallel.fp8.multiply import multiply_quantized
from hpctrain.parallel.fp8.quantization_loss import operand_name, record_counts, record_loss
from hpctrain.parallel.fp8.quantize import QuantizedTensor, ScaleBlocks, Scaling
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.matmul import Matmul, Operand
from hpctrain.parallel.shards import Parameter

Kind = Literal["inputs", "weights", "gradients"]
"""Operand that is quantized; gradients are those of the output."""

KINDS: tuple[Kind, ...] = ("inputs", "weights", "gradients")

Dims = tuple[Literal["tokens", "inputs", "outputs"], Literal["tokens", "inputs", "outputs"]]
"""Meaning of the rows and the columns of a matrix: tokens m, input features k or output features n."""

_INPUTS: Dims = ("tokens", "inputs")
_GRADIENTS: Dims = ("tokens", "outputs")

WEIGHTS: Dims = ("outputs", "inputs")
TRANSPOSED_WEIGHTS: Dims = ("inputs", "outputs")
"""Dims of the weights for the output, and for the gradient of the input."""


class PrequantizedWeights(NamedTuple):
    """Weights [n, k] that ranks have gathered in 8 bits, with one scale.

    Attributes:
        weights: The quantized weights.
        counts: Losses of the weights that this rank owns, of `count_losses`. None if they are not recorded.
    """

    weights: QuantizedTensor
    counts: Tensor | None


class QuantizedMatmul(Matmul):
    """Products of which all operands are quantized from high precision.

    The saved inputs are in 8 bits, as the product for the weight gradient takes them. Logits are not in 8
    bits.

    Args:
        weights: Weights [n_i, k], as for Matmul.
        layer_context: Context of the layer, with settings of products in 8 bits.
    """

    def __init__(self, weights: Sequence[Parameter], layer_context: LayerContext) -> None:
        super().__init__(weights, layer_context)
        settings = layer_context.products.fp8
        assert settings is not None
        self.settings, self.recipe = settings, settings.recipe
        self._weight_maxima: dict[Dims, Tensor] = {}
        self._prequantized: PrequantizedWeights | None = None

    @override
    def forward(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._forward(self._quantize("inputs", _rows(inputs), _INPUTS), inputs, bias)

    @override
    def input_gradient(self, output_gradient: Operand, out: Tensor | None = None) -> Tensor:
        if isinstance(output_gradient, QuantizedTensor):
            return self._input_gradient(output_gradient, self.weights[0].dtype)
        left = self._quantize("gradients", _rows(output_gradient), _GRADIENTS)
        gradient = self._input_gradient(left, output_gradient.dtype).view(*output_gradient.shape[:-1], -1)
        return gradient if out is None else out.copy_(gradient)

    @override
    def add_weight_gradient(self, output_gradient: Operand, inputs: Operand) -> None:
        left, right = output_gradient, inputs
        if isinstance(left, Tensor):
            left = self._quantize("gradients", _rows(left), _GRADIENTS, transposed=True)
        if isinstance(right, Tensor):
            right = self._quantize("inputs", _rows(right), _INPUTS, transposed=True)
        self._add(left, right)

    @override
    def forward_and_save(
        self, inputs: Tensor, bias: Tensor | None, sequence_group: Group | None, compact: bool
    ) -> tuple[Tensor, Operand]:
        # With one scale, the multiplied values are saved. Otherwise the transposed inputs are quantized here.
        rows, dims = _rows(inputs), _INPUTS
        if self.settings.quantize_messages and sequence_group is not None:
            local = self._quantize("inputs", rows, dims, is_piece=True)
            gathered = local.gather(sequence_group)
        else:
            all_rows = rows if sequence_group is None else sequence_group.all_gather(rows)
            local = gathered = self._quantize("inputs", all_rows, dims)
            if sequence_group is not None and self.has_one_token_scale:
                chunk = gathered.values.chunk(sequence_group.size)[sequence_group.rank]
                local = replace(gathered, values=chunk.clone())
        output = self._forward(gathered, inputs, bias)
        if not compact or not self.has_complete_blocks(len(rows), sequence_group):
            return output, inputs
        if not self.has_one_token_scale:
            local = self._quantize("inputs", rows, dims, sequence_group is not None, transposed=True)
        return output, local

    @override
    def saved_operand(self, tensors: Sequence[Tensor]) -> Operand:
        if len(tensors) == 1:
            return tensors[0]
        values, scales = tensors
        return QuantizedTensor(values, scales, self.recipe.tokens.transposed.blocks)

    @override
    def gather_gradient(self, output_gradient: Tensor, sequence_group: Group | None) -> Operand:
        if not self.has_one_token_scale:
            return super().gather_gradient(output_gradient, sequence_group)
        # Both products have the same scale, and so the same numbers in 8 bits.
        rows, dims = _rows(output_gradient), _GRADIENTS
        if self.settings.quantize_messages and sequence_group is not None:
            return self._quantize("gradients", rows, dims, is_piece=True).gather(sequence_group)
        rows = rows if sequence_group is None else sequence_group.all_gather(rows)
        return self._quantize("gradients", rows, dims)

    @property
    def has_one_token_scale(self) -> bool:
        """True if all rows of tokens share one scale, so the transposed matrix has the same numbers."""
        return self.recipe.tokens.blocks == ScaleBlocks()

    # Weights that ZeRO splits, and their maxima

    @property
    def weight_dims(self) -> tuple[Dims, ...]:
        """Dims of the weights whose maxima should be set in advance.

        They are those of which one serves both products, or which need a reduction over ranks.
        """
        if self.has_one_token_scale:
            return (WEIGHTS,)
        both, tensor = (WEIGHTS, TRANSPOSED_WEIGHTS), self.layer_context.tensor
        scaling = self.recipe.weights
        return tuple(dims for dims in both if tensor.size > 1 and self._holders(scaling, dims, False))

    @property
    def weight_maxima(self) -> Tensor | None:
        """Largest magnitude [1, 1] of weights with one scale, if it is known without the weights."""
        if self.weights[0].is_meta:  # a plan, in which no value is known
            return self.weights[0].new_empty((1, 1), dtype=torch.float32)
        return self._weight_maxima.get(WEIGHTS)

    def set_prequantized(self, weights: PrequantizedWeights | None) -> None:
        """Set the weights to multiply instead of those that this class would quantize, or remove them.

        A bucket that gathers in 8 bits (`EightBitBucket`) sets and removes them.
        """
        self._prequantized = weights

    def record_weight_maximum(self, largest: Tensor) -> None:
        """Record the largest magnitude [1] of the weights that this rank owns, if later steps need it."""

    def local_weight_maxima(self, dims: Dims) -> Tensor:
        """Return the maxima [M, K] of the blocks of this rank's part of the weights, which are in memory."""
        return self.recipe.weights.maxima(self.weight() if dims == WEIGHTS else self.weight().t())

    def set_weight_maxima(self, dims: Dims, maxima: Tensor) -> None:
        """Use these maxima [M, K] over all ranks for the weights with `dims` until they are cleared."""
        self._weight_maxima[dims] = maxima
        if self.has_one_token_scale:
            self._weight_maxima[TRANSPOSED_WEIGHTS] = maxima

    def clear_weight_maxima(self) -> None:
        """Discard the maxima of the weights, which may change now."""
        self._weight_maxima.clear()

    # Products of quantized operands

    def _forward(self, left: QuantizedTensor, inputs: Tensor, bias: Tensor | None) -> Tensor:
        right = self._weights(WEIGHTS)
        output = multiply_quantized(left, right, inputs.dtype)
        self._check(left, right, output, transposed=False)
        output = output.view(-1, *inputs.shape[1:-1], len(right.values))
        return output if bias is None else output.add_(bias)

    def _input_gradient(self, left: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        right = self._weights(TRANSPOSED_WEIGHTS)
        output = multiply_quantized(left, right, dtype)
        self._check(left, right, output, transposed=True)
        return output

    def _add(self, left: QuantizedTensor, right: QuantizedTensor) -> None:
        """Add the product of gradients [m, n] and inputs [m, k], scaled by blocks of tokens."""
        gradient, overwrite = self.gradient_buffer()
        audit = self.layer_context.products.active_audit
        if audit is not None:
            audit.expect_quantized_addition(self.weights, (left, right), gradient, overwrite)
        product = multiply_quantized(left.transposed(), right.transposed(), gradient.dtype)
        if overwrite:
            gradient.copy_(product)
        else:
            gradient.add_(product)
        if audit is not None:
            audit.finish_addition(self.weights)

    def _check(self, left: QuantizedTensor, right: QuantizedTensor, output: Tensor, transposed: bool) -> None:
        """Check a product of rows with weights in 8 bits, in steps that are checked."""
        audit = self.layer_context.products.active_audit
        if audit is not None:
            audit.check_quantized_product(self.weights, (left, right), output, transposed)

    # Quantization

    def _weights(self, dims: Dims) -> QuantizedTensor:
        if self._prequantized is None:
            matrix = self.weight()
            return self._quantize("weights", matrix if dims == WEIGHTS else matrix.t(), dims)
        (weights, counts), maxima = self._prequantized, self.weight_maxima
        assert maxima is not None
        if counts is not None:
            name = operand_name(self.weights[0].shard.name, "weights", " ".join(dims))
            record_counts(self.layer_context.statistics, name, counts, maxima, weights)
        return weights if dims == WEIGHTS else weights.transposed()

    def has_complete_blocks(self, rows: int, sequence_group: Group | None) -> bool:
        """Return True if no block of the saved inputs has rows of two ranks."""
        height = self.recipe.tokens.transposed.blocks.rows
        return sequence_group is None or height is None or rows % height == 0

    def _quantize(
        self, kind: Kind, matrix: Tensor, dims: Dims, is_piece: bool = False, transposed: bool = False
    ) -> QuantizedTensor:
        """Quantize a matrix for a product that sums over its columns.

        Inputs are zero where tokens are padding, so no scale of real tokens depends on what padding holds.

        Args:
            kind: Operand that the matrix is.
            matrix: The matrix.
            dims: Meaning of its rows and columns.
            is_piece: True if its tokens are this tensor rank's piece of the sequence.
            transposed: True if the product sums over its rows instead.
        """
        padding = None if kind == "weights" else self._padding(len(matrix))
        if padding is not None and kind == "inputs":
            matrix = matrix.masked_fill(padding, 0.0)
        scaling = self.recipe.weights if kind == "weights" else self.recipe.tokens
        scaling = scaling.transposed if transposed else scaling
        form = self.settings.gradient_format if kind == "gradients" else E4M3
        maxima = self._maxima(kind, scaling, matrix, dims, is_piece)
        quantized = scaling.quantize(matrix, form, maxima)
        use = " ".join(dims[::-1] if transposed else dims)
        name = operand_name(self.weights[0].shard.name, kind, use)
        record_loss(self.layer_context.statistics, name, matrix, maxima, quantized, padding)
        return quantized

    def _padding(self, rows: int) -> Tensor | None:
        """Return which rows of tokens are padding, bool [rows, 1], or None if there is none.

        `rows` are those of all tokens of the rank's micro-batch, or of this rank's piece on the tensor axis.
        """
        padding = self.layer_context.statistics.padding
        if padding is None:
            return None
        flat, tensor = padding.flatten(), self.layer_context.tensor
        if len(flat) != rows:
            flat = flat.chunk(tensor.size)[tensor.rank]
        assert len(flat) == rows, (padding.shape, rows)
        return flat.unsqueeze(1)

    def _maxima(self, kind: Kind, scaling: Scaling, matrix: Tensor, dims: Dims, is_piece: bool) -> Tensor:
        """Return the maxima of everything that shares a scale, on any rank."""
        if kind == "weights" and dims in self._weight_maxima:
            return self._weight_maxima[dims]
        maxima = reducible_maximum(scaling.maxima(matrix))
        holders = self._holders(scaling, dims, is_piece)
        return maxima if holders is None or holders.size == 1 else holders.all_reduce(maxima, "max")

    def _holders(self, scaling: Scaling, dims: Dims, is_piece: bool) -> Group | None:
        """Return the ranks that hold parts of a block: those that split a dim which the block spans."""
        spanned = {dim for dim, size in zip(dims, scaling.blocks, strict=True) if size is None}
        split = {
            dim
            for dim, number in (("outputs", 0), ("inputs", 1))
            if any(weight.shard.local[number] != weight.shard.shape[number] for weight in self.weights)
        }
        if "tokens" in spanned:
            return (
                self.layer_context.micro_batch if spanned & split or is_piece else self.layer_context.context
            )
        return self.layer_context.tensor if spanned & split else None


def _rows(values: Tensor) -> Tensor:
    """Return [..., features] as a matrix."""
    return values.reshape(-1, values.shape[-1])
