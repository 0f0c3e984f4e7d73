"""Functions of a block besides its matrix products, by torch's operations; the interface of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.deck.activations import Activation, ElementwiseFunction
from hpctrain.parallel.backward.autograd import apply_function
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs
from hpctrain.parallel.kernels.attention_tiles import AttentionRule
from hpctrain.parallel.kernels.blockwise_attention import blockwise_attention
from hpctrain.parallel.kernels.logits import SoftmaxStatistics, SplitLogits
from hpctrain.parallel.kernels.normalization import normalize


class LayerFunctions:
    """Functions by torch's operations.

    Args:
        note: Reason why they are used although the deck asks for compiled ones, or details of compiled ones.
        library_checksums: Checksums of the compiled libraries of all nodes, as text; "" without one.

    Attributes:
        compiled: True for functions of a compiled library.
    """

    compiled = False

    def __init__(self, note: str = "", library_checksums: str = "") -> None:
        self.note, self.library_checksums = note, library_checksums

    def compiles(self, activation: Activation) -> bool:
        """Return True if a compiled kernel computes an activation."""
        return self.compiled and activation.kernel is not None

    def activate(self, x: Tensor, activation: Activation, sizes: Sequence[int]) -> Tensor:
        """Return the activation of the expanded features of tokens.

        Args:
            x: Features, [..., n]; with a gate (arXiv 2002.05202) gate and up side by side, [..., 2 n].
            activation: Activation to compute.
            sizes: Sizes of gate and up in the last dimension, or of that dimension alone.
        """
        if not activation.gated:
            return _elementwise(x, activation.function)
        gate, up = torch.split(x, list(sizes), dim=-1)
        if activation.up_function is not None:
            up = _elementwise(up, activation.up_function)
        return _elementwise(gate, activation.function) * up

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, offset: int = 0) -> Tensor:
        """Return the RMSNorm (arXiv 1910.07467) over the last dim.

        Args:
            x: Features [..., h].
            weight: Weight [h].
            epsilon: Number that is added to the mean square.
            offset: Number that is added to the weight: 0, or 1 in Gemma.
        """
        if offset:
            return normalize(x, weight, None, False, epsilon, offset)
        return functional.rms_norm(x, weight.shape, weight, epsilon)

    def head_norm(self, x: Tensor, weight: Tensor, epsilon: float, offset: int = 0) -> Tensor:
        """Return the RMSNorm of queries or keys [s, b, heads, d] over each head.

        Args:
            x: Queries or keys.
            weight: Weight [d] of all heads.
            epsilon: As in `rms_norm`.
            offset: As in `rms_norm`.
        """
        return normalize(x, weight, None, False, epsilon, offset)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        """Return the LayerNorm (arXiv 1607.06450) over the last dim."""
        return functional.layer_norm(x, weight.shape, weight, bias, epsilon)

    def softmax_statistics(self, logits: SplitLogits, column: Tensor) -> SoftmaxStatistics:
        """Return the softmax statistics of logits, and of the logit at `column` [n] of each row."""
        return SoftmaxStatistics(logits, column)

    def attend(self, inputs: AttentionInputs, rule: AttentionRule) -> Tensor:
        """Return the causal softmax attention [s, b, heads, d] of complete sequences.

        Args:
            inputs: Queries, keys, values, and what else attention depends on.
            rule: Scale, window and soft cap.
        """
        if inputs.tables:
            inputs = inputs.rotated()
        query, key, value, sinks, _, documents = inputs
        if rule.needs_tiles or sinks is not None or documents is not None:
            return blockwise_attention(inputs, rule)
        output = functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            scale=rule.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return output.permute(2, 0, 1, 3)


def _elementwise(x: Tensor, function: ElementwiseFunction) -> Tensor:
    if function.saves_input:
        return function.value(x)
    result: Tensor = apply_function(_Elementwise, x, function)
    return result


class _Elementwise(torch.autograd.Function):
    """Elementwise function with its own gradient, which saves only the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: ElementwiseFunction) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        return function.value(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        result = torch.empty_like(gradient)
        ctx.function.gradient(gradient, x, result)
        return result, None


TORCH = LayerFunctions()
