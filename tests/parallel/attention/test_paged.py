"""Attention to keys and values in pages: where it is compiled it has the bits of the whole text's attention,
whatever rows are beside, and torch's agrees to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hpctrain.engine.choices.function_choice import compile_functions
from hpctrain.host.c_libraries import open_library
from hpctrain.parallel.attention.paged import LayerPages, PageLayout, TokenPositions
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs
from hpctrain.parallel.kernels.attention_tiles import AttentionRule
from hpctrain.parallel.kernels.functions.compiled_functions import CompiledFunctions
from hpctrain.parallel.kernels.functions.function_library import PAGE
from hpctrain.parallel.kernels.functions.layer_functions import TORCH, LayerFunctions

LENGTHS = (70, 1, 33, 5)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def compiled() -> CompiledFunctions:
    return CompiledFunctions(open_library(compile_functions()))


def tables_of(head: int, form: torch.dtype) -> list[Tensor]:
    angles = torch.randn(max(LENGTHS), 1, 1, head // 2, generator=torch.Generator().manual_seed(1))
    return [x.repeat(1, 1, 1, 2).to(form) for x in (angles.cos(), angles.sin())]


def paged(
    functions: LayerFunctions,
    texts: Sequence[list[Tensor]],
    tables: Sequence[Tensor],
    cuts: Sequence[Sequence[int]],
    pages: Tensor,
    rule: AttentionRule = AttentionRule(0.3),  # noqa: B008
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """The output of each text, whose rows come in passes that end at the `cuts` of all texts."""
    _, key, _ = texts[0]
    layout = PageLayout(key.shape[2], key.shape[3], key.dtype, bool(tables), functions.compiled)
    layer = LayerPages(layout, int(pages.max()) + 1, CPU, functions)
    found: list[list[Tensor]] = [[] for _ in texts]
    for before, after in pairwise(cuts):
        runs = [(n, a, b - a) for n, (a, b) in enumerate(zip(before, after, strict=True)) if a < b]
        rows = [torch.cat([x[a : a + c] for n, a, c in runs for x in [texts[n][kind]]]) for kind in range(3)]
        idle = [torch.cat((x, x.new_full((3, *x.shape[1:]), 7))) for x in rows]
        places = TokenPositions.of([*runs, (-1, 0, 3)], pages)
        inputs = AttentionInputs(*idle, sinks, tuple(tables))
        output = layer.attend(inputs, rule, places)
        assert output.shape == idle[0].shape
        assert not output[-3:].any()
        for (n, _, _), part in zip(runs, output.split([c for *_, c in runs] + [3]), strict=False):
            found[n].append(part)
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("form", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("heads", "groups", "head"), [(4, 4, 16), (6, 2, 40), (2, 1, 64)])
@pytest.mark.parametrize("rotated", [False, True])
def test_rows_have_the_bits_of_the_whole_text(
    compiled: CompiledFunctions, form: torch.dtype, heads: int, groups: int, head: int, rotated: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    texts = [
        [torch.randn(n, 1, many, head, generator=generator).to(form) for many in (heads, groups, groups)]
        for n in LENGTHS
    ]
    tables = tables_of(head, form) if rotated else []
    pages = torch.randperm(4 * 3, generator=generator).view(4, 3)
    at_once = [(0,) * 4, LENGTHS]
    one_by_one = [tuple(min(n, step) for n in LENGTHS) for step in range(max(LENGTHS) + 1)]
    mixed = [(0, 0, 0, 0), (0, 1, 31, 2), (64, 1, 32, 5), (67, 1, 33, 5), LENGTHS]
    for cuts in (at_once, one_by_one, mixed):
        for functions in (compiled, TORCH):
            found = paged(functions, texts, tables, cuts, pages)
            for (query, key, value), output in zip(texts, found, strict=True):
                turning = tuple(table[: len(query)] for table in tables)
                inputs = AttentionInputs(query, key, value, tables=turning)
                expected = functions.attend(inputs, AttentionRule(0.3))
                if functions.compiled:
                    assert torch.equal(output, expected)
                else:
                    rounding = 1e-5 if form == torch.float32 else 2e-2
                    torch.testing.assert_close(output, expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("form", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("window", "cap", "has_sinks"), [(3, 0.0, False), (40, 2.0, True), (0, 0.0, True)])
def test_rows_of_a_rule_have_the_bits_of_the_whole_text(
    compiled: CompiledFunctions, form: torch.dtype, rotated: bool, window: int, cap: float, has_sinks: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    texts = [
        [torch.randn(n, 1, many, 24, generator=generator).to(form) for many in (6, 2, 2)] for n in LENGTHS
    ]
    tables = tables_of(24, form) if rotated else []
    rule, sinks = AttentionRule(0.3, window, cap), torch.randn(6, generator=generator) if has_sinks else None
    pages = torch.randperm(4 * 3, generator=generator).view(4, 3)
    one_by_one = [tuple(min(n, step) for n in LENGTHS) for step in range(max(LENGTHS) + 1)]
    mixed = [(0, 0, 0, 0), (0, 1, 31, 2), (64, 1, 32, 5), (67, 1, 33, 5), LENGTHS]
    for cuts in (one_by_one, mixed):
        for functions in (compiled, TORCH):
            found = paged(functions, texts, tables, cuts, pages, rule, sinks)
            for (query, key, value), output in zip(texts, found, strict=True):
                turning = tuple(table[: len(query)] for table in tables)
                expected = functions.attend(AttentionInputs(query, key, value, sinks, turning), rule)
                if functions.compiled:
                    assert torch.equal(output, expected)
                else:
                    rounding = 1e-5 if form == torch.float32 else 2e-2
                    torch.testing.assert_close(output, expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("turned", [False, True])
def test_a_page_has_the_bytes_that_it_is_told_to_have(turned: bool) -> None:
    for functions, width in ((CompiledFunctions(), 48), (TORCH, 40)):
        layout = PageLayout(3, 40, torch.bfloat16, turned, functions.compiled)
        layer = LayerPages(layout, 5, CPU, functions)
        assert layer.keys.nbytes + layer.values.nbytes == 5 * layout.bytes
        per_key = 4 if turned and functions.compiled else 2
        assert layout.bytes == PAGE * 3 * width * (per_key + 2)
