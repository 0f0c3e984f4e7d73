"""Comparison of compiled functions with torch's, before a new library is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpctrain.deck.activations import ACTIVATIONS, Activation
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs
from hpctrain.parallel.kernels.attention_tiles import AttentionRule
from hpctrain.parallel.kernels.functions.layer_functions import TORCH, LayerFunctions
from hpctrain.parallel.kernels.logits import SplitLogits

_ROUNDING = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2e-2, 2e-2)}
"""Largest relative and absolute difference of results, by format."""


_Compute = Callable[..., Tensor]
"""Function of some operands, by one implementation."""


def agrees(functions: LayerFunctions) -> bool:
    """Return True if values and gradients agree with torch's on this machine, up to rounding."""
    return all(
        _same_results(compute_by(functions), compute_by(TORCH), operands, dtype)
        for compute_by, operands in _cases()
        for dtype in _ROUNDING
    )


def _cases() -> Iterator[tuple[Callable[[LayerFunctions], _Compute], list[Tensor]]]:
    """Yield functions to compare, which are taken from a LayerFunctions, and operands in fp32."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows, head = 70, 40  # more than a block, and complete tiles with a remainder
    angles = random(rows, 1, 1, head // 2).repeat(1, 1, 1, 2)
    tables = [x.bfloat16().float() for x in (angles.cos(), angles.sin())]
    for activation in ACTIVATIONS.values():
        if activation.kernel is not None:
            features = 21 * activation.input_projections
            yield partial(_activation, activation=activation), [4 * random(3, features)]
    yield lambda by: partial(by.rms_norm, epsilon=1e-5), [random(6, 35), random(35)]
    yield lambda by: partial(by.rms_norm, epsilon=1e-5, offset=1), [random(6, 35), random(35)]
    yield lambda by: partial(by.head_norm, epsilon=1e-5, offset=1), [random(5, 2, 3, 8), random(8)]
    yield lambda by: partial(by.layer_norm, epsilon=1e-5), [random(3, 35), random(35), random(35)]
    yield lambda by: lambda x: _CrossEntropyTrial.apply(x, by), [3 * random(4, 1100)]
    operands = [random(rows, 2, heads, head) for heads in (4, 2, 2)]
    yield partial(_attention, rule=AttentionRule(head**-0.5), tables=tables), operands
    bounded = AttentionRule(head**-0.5, window=37, cap=1.5)
    yield partial(_attention, rule=bounded, tables=()), [*operands, random(4)]


def _activation(functions: LayerFunctions, activation: Activation) -> _Compute:
    return partial(functions.activate, activation=activation, sizes=[21] * activation.input_projections)


def _attention(functions: LayerFunctions, rule: AttentionRule, tables: Sequence[Tensor]) -> _Compute:
    """Return attention of queries, keys, values and maybe sinks."""

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        converted = tuple(table.to(query.dtype) for table in tables)
        return functions.attend(AttentionInputs(query, key, value, sinks, converted), rule)

    return attend


def _same_results(one: _Compute, other: _Compute, operands: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Return True if results and gradients in a dtype agree with the other function's in fp32."""
    results = []
    for compute, compute_dtype in ((one, dtype), (other, torch.float32)):
        leaves = [x.to(dtype).to(compute_dtype).requires_grad_() for x in operands]
        result = compute(*leaves)
        weight = torch.linspace(1, 7, result.numel()).cos().view(result.shape).to(dtype)
        gradients = torch.autograd.grad(result, leaves, weight.to(compute_dtype))
        results.append([each.detach().float() for each in (result, *gradients)])
    relative, absolute = _ROUNDING[dtype]
    return all(torch.allclose(a, b, rtol=relative, atol=absolute) for a, b in zip(*results, strict=True))


class _CrossEntropyTrial(torch.autograd.Function):
    """Cross-entropies [n] of logits x, from the softmax statistics of `functions`.

    The last three columns are padding. Gradients are multiplied by 1000, so that differences are visible.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, functions: LayerFunctions) -> Tensor:
        column = torch.arange(len(x)) * 271 - 1
        statistics = functions.softmax_statistics(SplitLogits(x.clone(), x.shape[1] - 3, 0.7), column)
        ctx.statistics, ctx.predicted = statistics, column >= 0
        losses = statistics.total.log() + statistics.maximum - statistics.at_column
        return losses.masked_fill(column < 0, 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        weight = 1000 * gradient.float() * ctx.predicted
        result: Tensor = ctx.statistics.gradient(weight / ctx.statistics.total, weight)
        return result, None
