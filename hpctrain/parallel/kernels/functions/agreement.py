"""Comparison of compiled functions with torch's, before a new library is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        converted = tuple(table.to(query.dtype) for table in tables)
        return by.attend(AttentionInputs(query, key, value, sinks, converted), rule)

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
