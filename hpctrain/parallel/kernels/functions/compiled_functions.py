"""Functions of a block besides its matrix products, by the library that is compiled from `functions.c`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.deck.activations import Activation
from hpctrain.parallel.backward.autograd import apply_function
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs
from hpctrain.parallel.kernels.attention_tiles import AttentionRule
from hpctrain.parallel.kernels.functions.compiled_attention import (
    compiled_attention,
    empty_contiguous,
)
from hpctrain.parallel.kernels.functions.function_library import declare_functions
from hpctrain.parallel.kernels.functions.layer_functions import LayerFunctions
from hpctrain.parallel.kernels.logits import CompiledSoftmaxStatistics, SoftmaxStatistics, SplitLogits


class CompiledFunctions(LayerFunctions):
    """Functions of a library that is compiled from `functions.c`.

    They compute in one thread, with tensors in fp32 and bf16.

    Args:
        library: The library. Without one, plans can use the object, but it cannot compute.
        note: Why these functions are used, or which compiler made the library, for the log of the run.
        library_checksums: Checksums of the compiled libraries of all nodes, as text; "" without one.
    """

    compiled = True

    def __init__(
        self, library: ctypes.CDLL | None = None, note: str = "", library_checksums: str = ""
    ) -> None:
        super().__init__(note, library_checksums)
        self._library = None if library is None else declare_functions(library)

    @property
    def library(self) -> ctypes.CDLL:
        """Compiled library. Its functions take tensors, numbers and structures (`FUNCTIONS`)."""
        assert self._library is not None, "no library: these functions are for plans"
        return self._library

    @override
    def activate(self, x: Tensor, activation: Activation, sizes: Sequence[int]) -> Tensor:
        if activation.kernel is None:
            return super().activate(x, activation, sizes)
        assert not activation.gated or sizes[0] == sizes[1] == x.shape[-1] // 2
        result: Tensor = apply_function(_Activation, x, self.library, activation.kernel, activation.gated)
        return result

    @override
    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, offset: int = 0) -> Tensor:
        result: Tensor = apply_function(_RmsNorm, x, weight, self.library, epsilon, offset)
        return result

    @override
    def head_norm(self, x: Tensor, weight: Tensor, epsilon: float, offset: int = 0) -> Tensor:
        return self.rms_norm(x, weight, epsilon, offset)

    @override
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        result: Tensor = apply_function(_LayerNorm, x, weight, bias, self.library, epsilon)
        return result

    @override
    def softmax_statistics(self, logits: SplitLogits, column: Tensor) -> SoftmaxStatistics:
        if logits.cap:
            return super().softmax_statistics(logits, column)
        return CompiledSoftmaxStatistics(logits, column, self.library)

    @override
    def attend(self, inputs: AttentionInputs, rule: AttentionRule) -> Tensor:
        return compiled_attention(self.library, inputs, rule)


class _Activation(torch.autograd.Function):
    """Activation by a C function and its gradient. Saves x.

    With a gate, rows of x [..., 2 n] have n features of the gate, then n others, and the result is [..., n].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, library: ctypes.CDLL, name: str, gated: bool) -> Tensor:
        x = x.contiguous()
        width = x.shape[-1] // 2 if gated else x.shape[-1]
        sizes = x.numel() // x.shape[-1], width, x.element_size()
        result = x.new_empty(*x.shape[:-1], width) if gated else torch.empty_like(x)
        getattr(library, name)(x, result, *sizes)
        ctx.gradient, ctx.sizes = getattr(library, f"{name}_gradient"), sizes
        ctx.save_for_backward(x)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        result = torch.empty_like(x)
        ctx.gradient(gradient.contiguous(), x, result, *ctx.sizes)
        return result, None, None, None


class _RmsNorm(torch.autograd.Function):
    """RMSNorm of x over the last dim, with factors weight + offset. Saves x and one fp32 number per row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, library: ctypes.CDLL, epsilon: float, offset: int
    ) -> Tensor:
        x, stride, sizes = _even_tokens(x)
        inverse, result = torch.empty(sizes[0] * sizes[1]), empty_contiguous(x)
        options = offset, x.element_size()
        library.rms_norm(x, stride, weight, result, inverse, *sizes, epsilon, *options)
        ctx.library, ctx.options = library, options
        ctx.save_for_backward(x, weight, inverse)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        (x, stride, sizes), gradient = _even_tokens(x), gradient.contiguous()
        result, weight_gradient = empty_contiguous(x), torch.zeros(weight.shape)
        operands = gradient, x, stride, weight, inverse, result, weight_gradient
        ctx.library.rms_norm_gradient(*operands, *sizes, *ctx.options)
        return result, weight_gradient.to(weight.dtype) if ctx.needs_input_grad[1] else None, None, None, None


def _even_tokens(x: Tensor) -> tuple[Tensor, int, tuple[int, int, int]]:
    """Return x, the stride of its tokens, and the numbers of tokens, of rows of each, and of features.

    Heads [s, b, heads, d] may be a slice of a larger tensor, if one stride leads from each token to the next.
    All rows of other tensors are one token, and are copied unless they are contiguous.
    """
    if x.dim() == 4:
        sequence, batch, heads, features = x.shape
        row, token, head, feature = x.stride()
        if feature == 1 and head == features and row == batch * token:
            return x, token, (sequence * batch, heads, features)
    width = x.shape[-1]
    return x.contiguous(), 0, (1, x.numel() // width, width)


class _LayerNorm(torch.autograd.Function):
    """LayerNorm of the last dim of x. Saves x and two fp32 numbers per row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, library: ctypes.CDLL, epsilon: float
    ) -> Tensor:
        x = x.contiguous()
        rows, size = prod(x.shape[:-1]), x.element_size()
        result, mean, inverse = torch.empty_like(x), torch.empty(rows), torch.empty(rows)
        library.layer_norm(x, weight, bias, result, mean, inverse, rows, x.shape[-1], epsilon, size)
        ctx.library = library
        ctx.save_for_backward(x, weight, mean, inverse)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        gradient, result = gradient.contiguous(), torch.empty_like(x)
        sums = torch.zeros(2, *weight.shape)
        rows, width, size = inverse.numel(), x.shape[-1], x.element_size()
        ctx.library.layer_norm_gradient(gradient, x, weight, mean, inverse, result, *sums, rows, width, size)
        weight_gradient, bias_gradient = (
            each.to(weight.dtype) if needed else None
            for each, needed in zip(sums, ctx.needs_input_grad[1:3], strict=True)
        )
        return result, weight_gradient, bias_gradient, None, None
