"""Attention within documents beside softmax under a mask, in double precision: values and gradients.

Tests of parallel/kernels/blockwise_attention.py, and of documents in
parallel/kernels/functions/layer_functions.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from hpctrain.data.documents import Documents
from hpctrain.engine.choices.function_choice import compile_functions
from hpctrain.host.c_libraries import open_library
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs
from hpctrain.parallel.kernels.attention_tiles import AttentionRule
from hpctrain.parallel.kernels.blockwise_attention import blockwise_attention
from hpctrain.parallel.kernels.functions.compiled_functions import CompiledFunctions
from hpctrain.parallel.kernels.functions.layer_functions import TORCH, LayerFunctions
from tests.parallel.kernels.test_attention_block import kernel

__all__ = ["kernel"]

ROWS, BATCH, HEADS, GROUPS, SIZE = 150, 3, 4, 2, 24
RULE = AttentionRule(SIZE**-0.5)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module")
def compiled() -> CompiledFunctions:
    return CompiledFunctions(open_library(compile_functions()))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def documents() -> Documents:
    """Of one token and of many, two whose ends follow each other, and one that is a whole row."""
    tokens = torch.ones(BATCH, ROWS, dtype=torch.int64)
    for row, ends in enumerate(((0, 1, 40, 100), (63, 64, 149), ())):
        tokens[row, list(ends)] = 0
    return Documents.of(tokens, 0)


def within_documents(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return blockwise_attention(AttentionInputs(query, key, value, documents=documents()), RULE)


def masked_softmax(among: Documents, tables: Sequence[Tensor]) -> Callable[..., Tensor]:
    """Written out, of a whole mask [b, s, s]."""
    index = torch.arange(ROWS)
    begins = index - among.places
    sees = (index[None, None, :] >= begins[:, :, None]) & (index[None, None, :] <= index[None, :, None])

    def compute(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if tables:
            cosine, sine = (x.double() for x in tables)
            query, key = (
                x * cosine + torch.cat((-x[..., SIZE // 2 :], x[..., : SIZE // 2]), -1) * sine
                for x in (query, key)
            )
        key, value = (x.repeat_interleave(HEADS // GROUPS, 2) for x in (key, value))
        scores = torch.einsum("ibhd,jbhd->bhij", query, key) * SIZE**-0.5
        scores = scores.masked_fill(~sees[:, None], -math.inf)
        return torch.einsum("bhij,jbhd->ibhd", scores.softmax(-1), value)

    return compute


def derived(compute: Callable[..., Tensor], inputs: Sequence[Tensor], weight: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    result = compute(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, weight.to(result.dtype))]


def inputs_of(form: torch.dtype) -> tuple[list[Tensor], Tensor]:
    inputs = [random(ROWS, BATCH, count, SIZE, seed=count).to(form) for count in (HEADS, GROUPS)]
    inputs.append(random(ROWS, BATCH, GROUPS, SIZE, seed=9).to(form))
    return inputs, random(ROWS, BATCH, HEADS, SIZE, seed=1).to(form)


def compare(own: Callable[..., Tensor], form: torch.dtype, tables: Sequence[Tensor] = ()) -> None:
    inputs, weight = inputs_of(form)
    exact = derived(masked_softmax(documents(), tables), [x.double() for x in inputs], weight)
    for found, right in zip(derived(own, inputs, weight), exact, strict=True):
        assert found.dtype == form
        assert float((found.double() - right).norm()) <= ROUNDING[form] * float(right.norm())


def test_in_double_precision() -> None:
    inputs, weight = inputs_of(torch.float64)
    own = derived(
        within_documents,
        inputs,
        weight,
    )
    for found, right in zip(own, derived(masked_softmax(documents(), ()), inputs, weight), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-6)


def test_by_every_kernel(kernel: str) -> None:
    compare(
        within_documents,
        torch.float32,
    )


@pytest.mark.parametrize("form", ROUNDING)
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("by", ["torch", "compiled"])
def test_by_all_functions(compiled: CompiledFunctions, form: torch.dtype, turns: bool, by: str) -> None:
    functions: LayerFunctions = compiled if by == "compiled" else TORCH
    angles = random(ROWS, 1, 1, SIZE // 2).repeat(1, 1, 1, 2)
    tables = tuple(x.to(form) for x in (angles.cos(), angles.sin())) if turns else ()

    def own(*operands: Tensor) -> Tensor:
        return functions.attend(AttentionInputs(*operands, tables=tables, documents=documents()), RULE)

    compare(own, form, tables)


def test_a_document_is_computed_as_one_that_is_alone(compiled: CompiledFunctions) -> None:
    """To the last bit, and nothing is computed of what others of its row have."""
    inputs, weight = inputs_of(torch.float32)
    inputs[1][:40, 0] = math.nan  # the first two and part of the third document
    for functions in (compiled, TORCH):
        whole = derived(
            lambda *x, by=functions: by.attend(AttentionInputs(*x, documents=documents()), RULE),
            inputs,
            weight,
        )
        at = slice(41, 101), slice(0, 1)
        alone = derived(
            lambda *x, by=functions: by.attend(AttentionInputs(*x), RULE),
            [x[at] for x in inputs],
            weight[at],
        )
        assert all(torch.equal(each[at], own) for each, own in zip(whole, alone, strict=True))
        assert bool(whole[0][41:].isfinite().all())
