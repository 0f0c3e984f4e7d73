"""Functions of a block besides its matrix products: by torch's operations, or compiled from `functions.c`.

On a CPU torch computes a gate, a rotation or an RMSNorm in several passes over memory, exponentials of GELU
slowly, and attention in blocks with small products. The compiled functions read their operands once and
compute in fp32, so results agree up to the rounding of their format.

    LayerFunctions         torch's operations, and the interface
    └── CompiledFunctions  functions of the compiled library
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from math import log, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from hpctrain.data.documents import Documents
from hpctrain.deck.activations import ACTIVATIONS, Activation, ElementwiseFunction
from hpctrain.parallel.backward.autograd import apply_function
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs
from hpctrain.parallel.kernels.attention_tiles import AttentionRule, sinks_gradient
from hpctrain.parallel.kernels.function_library import AttentionArguments, Heads, workspace_floats
from hpctrain.parallel.kernels.logits import CompiledSoftmaxStatistics, SoftmaxStatistics, SplitLogits
from hpctrain.parallel.kernels.normalization import normalize
from hpctrain.parallel.kernels.packed_attention import document_attention
from hpctrain.parallel.kernels.tiled_attention import tiled_attention

_ROUNDING = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2e-2, 2e-2)}
"""Largest relative and absolute difference of results, by format."""


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
        inputs = inputs.rotated()
        query, key, value, sinks, _, documents = inputs
        if rule.needs_tiles or sinks is not None:
            return tiled_attention(inputs, rule)
        if documents is not None:
            return document_attention(query, key, value, documents, rule.scale)
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


class CompiledFunctions(LayerFunctions):
    """Functions of a library that is compiled from `functions.c`.

    They compute in one thread, with tensors in fp32 and bf16.

    Args:
        library: The library. Without one they can be planned with, but not computed.
        note: Why these functions are used, or which compiler made the library, for the log of the run.
        library_checksums: Checksums of the compiled libraries of all nodes, as text; "" without one.
    """

    compiled = True

    def __init__(
        self, library: ctypes.CDLL | None = None, note: str = "", library_checksums: str = ""
    ) -> None:
        super().__init__(note, library_checksums)
        self._library = library

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the library. Tensors are passed by address, and integers as 8 bytes."""
        assert self._library is not None
        getattr(self._library, name)(*map(_argument, arguments))

    def activate(self, x: Tensor, activation: Activation, sizes: Sequence[int]) -> Tensor:
        """Return the activation of the expanded features of tokens, by its kernel if it has one."""
        if activation.kernel is None:
            return super().activate(x, activation, sizes)
        assert not activation.gated or sizes[0] == sizes[1] == x.shape[-1] // 2
        result: Tensor = getattr(self, activation.kernel)(x)
        return result

    def gelu(self, x: Tensor) -> Tensor:
        """Return GELU by tanh (arXiv 1606.08415)."""
        result: Tensor = apply_function(_Gelu, x, self)
        return result

    def gated(self, x: Tensor) -> Tensor:
        """Return SwiGLU (arXiv 2002.05202) of gate and up of the same size."""
        result: Tensor = apply_function(_Gated, x, self)
        return result

    def geglu(self, x: Tensor) -> Tensor:
        """Return GeGLU (arXiv 2002.05202), with GELU by tanh, of gate and up of the same size."""
        result: Tensor = apply_function(_Gated, x, self, "geglu")
        return result

    @override
    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, offset: int = 0) -> Tensor:
        result: Tensor = apply_function(_RmsNorm, x, weight, self, epsilon, offset)
        return result

    @override
    def head_norm(self, x: Tensor, weight: Tensor, epsilon: float, offset: int = 0) -> Tensor:
        return self.rms_norm(x, weight, epsilon, offset)

    @override
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        result: Tensor = apply_function(_LayerNorm, x, weight, bias, self, epsilon)
        return result

    @override
    def softmax_statistics(self, logits: SplitLogits, column: Tensor) -> SoftmaxStatistics:
        if logits.cap:
            return super().softmax_statistics(logits, column)
        return CompiledSoftmaxStatistics(logits, column, self.call)

    @override
    def attend(self, inputs: AttentionInputs, rule: AttentionRule) -> Tensor:
        query, key, value, sinks, tables, documents = inputs
        options = _AttendOptions(tables, rule, documents)
        result: Tensor = apply_function(_Attend, query, key, value, sinks, self, options)
        return result


def agrees(functions: LayerFunctions) -> bool:
    """Return True if values and gradients agree with torch's on this machine, up to rounding."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows, head = 70, 40  # more than a block, and complete tiles with a remainder
    angles = random(rows, 1, 1, head // 2).repeat(1, 1, 1, 2)
    tables = [x.bfloat16().float() for x in (angles.cos(), angles.sin())]
    cases: list[tuple[Callable[..., Callable[..., Tensor]], list[Tensor]]] = [
        *(
            (partial(_activation_by, activation=each), [4 * random(3, 21 * each.input_projections)])
            for each in ACTIVATIONS.values()
            if each.kernel is not None
        ),
        (lambda by: lambda x, weight: by.rms_norm(x, weight, 1e-5), [random(3, 35), random(35)]),
        (lambda by: lambda x, weight: by.rms_norm(x, weight, 1e-5, 1), [random(3, 35), random(35)]),
        (lambda by: lambda x, weight: by.head_norm(x, weight, 1e-5, 1), [random(5, 2, 3, 8), random(8)]),
        (lambda by: lambda x, *of: by.layer_norm(x, *of, 1e-5), [random(3, 35), random(35), random(35)]),
        (lambda by: lambda x: _CrossEntropyTrial.apply(x, by), [3 * random(4, 1100)]),
        (
            partial(_attention_by, rule=AttentionRule(head**-0.5), tables=tables),
            [random(rows, 2, heads, head) for heads in (4, 2, 2)],
        ),
        (
            partial(_attention_by, rule=AttentionRule(head**-0.5, 37, 1.5)),
            [*(random(rows, 2, heads, head) for heads in (4, 2, 2)), random(4)],
        ),
    ]
    return all(_agree(by(functions), by(TORCH), inputs, form) for by, inputs in cases for form in _ROUNDING)


def _attention_by(
    by: LayerFunctions, rule: AttentionRule, tables: Sequence[Tensor] = ()
) -> Callable[..., Tensor]:
    """Return attention by some functions, of queries, keys, values and maybe sinks."""

    def attend(*operands: Tensor) -> Tensor:
        converted = tuple(table.to(operands[0].dtype) for table in tables)
        return by.attend(AttentionInputs(*operands)._replace(tables=converted), rule)

    return attend


def _activation_by(by: LayerFunctions, activation: Activation) -> Callable[[Tensor], Tensor]:
    return lambda x: by.activate(x, activation, [21] * activation.input_projections)


def _agree(
    one: Callable[..., Tensor], other: Callable[..., Tensor], inputs: Sequence[Tensor], form: torch.dtype
) -> bool:
    """Return True if a function agrees with the `other` one, which computes the same numbers in fp32."""
    results = []
    for compute, dtype in ((one, form), (other, torch.float32)):
        leaves = [x.to(form).to(dtype).requires_grad_() for x in inputs]
        result = compute(*leaves)
        weight = torch.linspace(1, 7, result.numel()).cos().view(result.shape).to(form)
        gradients = torch.autograd.grad(result, leaves, weight.to(dtype))
        results.append([each.detach().float() for each in (result, *gradients)])
    relative, absolute = _ROUNDING[form]
    return all(torch.allclose(a, b, rtol=relative, atol=absolute) for a, b in zip(*results, strict=True))


class _CrossEntropyTrial(torch.autograd.Function):
    """Cross-entropies [n] by which `agrees` compares two implementations.

    The last three columns are padding. Gradients are multiplied by 1000, so that differences are visible.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, functions: LayerFunctions) -> Tensor:
        column = torch.arange(len(x)) * 271 - 1
        found = functions.softmax_statistics(SplitLogits(x.clone(), x.shape[1] - 3, 0.7), column)
        ctx.statistics, ctx.predicted = found, column >= 0
        return (found.total.log() + found.maximum - found.at_column).masked_fill(column < 0, 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        weight = 1000 * gradient.float() * ctx.predicted
        result: Tensor = ctx.statistics.gradient(weight / ctx.statistics.total, weight)
        return result, None


def _argument(value: object) -> object:
    match value:
        case Tensor():
            return ctypes.c_void_p(value.data_ptr())
        case ctypes.Structure():
            return ctypes.byref(value)
        case float():
            return ctypes.c_float(value)
        case _:
            return ctypes.c_int64(value) if isinstance(value, int) else value


def _heads(x: Tensor) -> Heads:
    assert x.stride(3) == 1
    return Heads(x.data_ptr(), *x.stride()[:3])


class _Gelu(torch.autograd.Function):
    """GELU by its tanh approximation, of x of any shape. Saves x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, functions: CompiledFunctions) -> Tensor:
        x = x.contiguous()
        result = torch.empty_like(x)
        functions.call("gelu", x, result, x.numel(), ctypes.c_int(x.element_size()))
        ctx.functions = functions
        ctx.save_for_backward(x)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        gradient, result, size = gradient.contiguous(), torch.empty_like(x), ctypes.c_int(x.element_size())
        ctx.functions.call("gelu_gradient", gradient, x, result, x.numel(), size)
        return result, None


class _Gated(torch.autograd.Function):
    """Gated activation of x [..., 2n], whose rows have n gate features, then n others: [..., n].

    `name` is the C function: `gated` for SwiGLU, silu(gate) * up, or that of GeGLU. Saves x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, functions: CompiledFunctions, name: str = "gated") -> Tensor:
        x = x.contiguous()
        width = x.shape[-1] // 2
        result = x.new_empty(*x.shape[:-1], width)
        functions.call(name, x, result, prod(x.shape[:-1]), width, ctypes.c_int(x.element_size()))
        ctx.functions, ctx.name = functions, name
        ctx.save_for_backward(x)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        gradient, result, size = gradient.contiguous(), torch.empty_like(x), ctypes.c_int(x.element_size())
        rows = prod(x.shape[:-1])
        ctx.functions.call(f"{ctx.name}_gradient", gradient, x, result, rows, x.shape[-1] // 2, size)
        return result, None, None


class _RmsNorm(torch.autograd.Function):
    """RMSNorm of x over the last dim, with factors weight + offset. Saves x and one fp32 number per row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, functions: CompiledFunctions, epsilon: float, offset: int
    ) -> Tensor:
        x, stride, sizes = _even_tokens(x)
        inverse, result = torch.empty(*x.shape[:-1], 1), x.new_empty(x.shape)
        options = ctypes.c_int(offset), ctypes.c_int(x.element_size())
        functions.call("rms_norm", x, stride, weight, result, inverse, *sizes, epsilon, *options)
        ctx.functions, ctx.options = functions, options
        ctx.save_for_backward(x, weight, inverse)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        (x, stride, sizes), gradient = _even_tokens(x), gradient.contiguous()
        result, of_weight = x.new_empty(x.shape), torch.zeros(weight.shape)
        operands = gradient, x, stride, weight, inverse, result, of_weight
        ctx.functions.call("rms_norm_gradient", *operands, *sizes, *ctx.options)
        return result, of_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None, None, None, None


def _even_tokens(x: Tensor) -> tuple[Tensor, int, tuple[int, int, int]]:
    """Return x, the stride of its tokens, and the numbers of tokens, of rows of each, and of features.

    Heads [s, b, heads, d] may lie between others, if one stride leads from each token to the next. All rows
    of other tensors are one token, and are copied unless they are contiguous.
    """
    if x.dim() == 4:
        sequence, batch, heads, features = x.shape
        row, token, head, feature = x.stride()
        if feature == 1 and head == features and row == batch * token:
            return x, token, (sequence * batch, heads, features)
    return x.contiguous(), 0, (1, prod(x.shape[:-1]), x.shape[-1])


class _LayerNorm(torch.autograd.Function):
    """LayerNorm of the last dim of x. Saves x and two fp32 numbers per row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, functions: CompiledFunctions, epsilon: float
    ) -> Tensor:
        x = x.contiguous()
        rows, size = prod(x.shape[:-1]), ctypes.c_int(x.element_size())
        result, mean, inverse = torch.empty_like(x), torch.empty(rows), torch.empty(rows)
        functions.call("layer_norm", x, weight, bias, result, mean, inverse, rows, x.shape[-1], epsilon, size)
        ctx.functions = functions
        ctx.save_for_backward(x, weight, mean, inverse)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        gradient, result = gradient.contiguous(), torch.empty_like(x)
        sums = torch.zeros(2, *weight.shape)
        rows, width, size = inverse.numel(), x.shape[-1], ctypes.c_int(x.element_size())
        ctx.functions.call(
            "layer_norm_gradient", gradient, x, weight, mean, inverse, result, *sums, rows, width, size
        )
        of_weight, of_bias = (
            each.to(weight.dtype) if needed else None
            for each, needed in zip(sums, ctx.needs_input_grad[1:3], strict=True)
        )
        return result, of_weight, of_bias, None, None


class _AttendOptions(NamedTuple):
    """Arguments of `CompiledFunctions.attend`: rotary tables, the rule of scores, and documents."""

    tables: Sequence[Tensor]
    rule: AttentionRule
    documents: Documents | None


class _Attend(torch.autograd.Function):
    """`CompiledFunctions.attend` by C functions, of queries, keys and values [s, b, heads, d].

    Rotates queries and keys first if there are tables. Saves the output and log-sum-exps, but no scores.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        functions: CompiledFunctions,
        options: _AttendOptions,
    ) -> Tensor:
        query, key, value = map(_rows, (query, key, value))
        rows, batch, heads, head = query.shape
        output, log_sums = query.new_empty(query.shape), torch.empty(batch, heads, rows)
        tables, rule, documents = ctx.options = options
        ctx.functions = functions
        memory = torch.empty(workspace_floats(rows, head))
        scores = None if sinks is None else sinks.float()
        for at in _attention_units(query, documents):
            operands = [x[at] for x in (query, key, value, output)]
            rotary_tables = [table[at[0]] for table in tables]
            sizes = attention_arguments(operands[0], operands[1], rotary_tables, rule, scores)
            pairs = sizes.batch * sizes.groups
            functions.call(
                "attend", sizes, *map(_heads, operands), _log_sums_from(log_sums, at), memory, 0, pairs
            )
        ctx.save_for_backward(query, key, value, sinks, output, log_sums, *tables)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, log_sums, *tables = ctx.saved_tensors
        gradient = _rows(gradient)
        results = [x.new_empty(x.shape) for x in (query, key, value)]
        memory = torch.empty(workspace_floats(query.shape[0], query.shape[3]))
        _, rule, documents = ctx.options
        for at in _attention_units(query, documents):
            operands = [x[at] for x in (query, key, value, output, gradient, *results)]
            sizes = attention_arguments(operands[0], operands[1], [table[at[0]] for table in tables], rule)
            addresses = *map(_heads, operands), _log_sums_from(log_sums, at)
            ctx.functions.call("attend_gradient", sizes, *addresses, memory, 0, sizes.batch * sizes.groups)
        of_sinks = None
        if sinks is not None:
            of_units = []
            for at in _attention_units(query, documents):
                unit = output[at]
                binary = _log_sums_from(log_sums, at)[: unit[..., 0].numel()]
                natural = binary.view(unit.shape[1], -1, unit.shape[0]) * log(2)
                of_units.append(sinks_gradient(gradient[at], unit, natural, sinks))
            of_sinks = torch.stack(of_units).sum(0)
        return *results, of_sinks, None, None


def _attention_units(query: Tensor, documents: Documents | None) -> list[tuple[slice, slice]]:
    """Return positions and batch rows of each separate attention: of all sequences, or of each document."""
    if documents is None:
        return [(slice(0, query.shape[0]), slice(0, query.shape[1]))]
    return [(slice(begin, end), slice(row, row + 1)) for row, begin, end in documents.pieces]


def _log_sums_from(log_sums: Tensor, at: tuple[slice, slice]) -> Tensor:
    """Return the memory [b, heads, s] of log-sum-exps from the unit `at` on."""
    _, heads, length = log_sums.shape
    return log_sums.view(-1)[heads * (at[1].start * length + at[0].start) :]


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def attention_arguments(
    query: Tensor, key: Tensor, tables: Sequence[Tensor], rule: AttentionRule, sinks: Tensor | None = None
) -> AttentionArguments:
    """Return the arguments of a compiled function. The tables and sinks must outlive them.

    Args:
        query: Queries [s, b, heads, d].
        key: Keys, which may have fewer heads.
        tables: Tables of a Rotary, or none.
        rule: Scale, window and soft cap.
        sinks: Score [heads] of a further key of each head in fp32, contiguous; None without one.
    """
    rows, batch, heads, head = query.shape
    addresses: list[int | None] = [table.data_ptr() for table in tables]
    addresses += [] if tables else [None, None]
    sizes = rows, batch, heads, key.shape[2], head, query.element_size()
    at_sinks = None if sinks is None else sinks.data_ptr()
    return AttentionArguments(*sizes, rule.scale, *addresses, rule.window, rule.cap, at_sinks)
