"""Attention with windows, soft caps and sinks by tiles, beside softmax under a mask: values and gradients.

Tests of parallel/kernels/attention_tiles.py and parallel/kernels/blockwise_attention.py.
"""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from hpctrain.data.documents import Documents
from hpctrain.engine.choices.function_choice import compile_functions
from hpctrain.host.c_libraries import open_library
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs
from hpctrain.parallel.kernels.attention_tiles import AttentionRule, band_tiles
from hpctrain.parallel.kernels.blockwise_attention import blockwise_attention
from hpctrain.parallel.kernels.functions.compiled_functions import CompiledFunctions
from hpctrain.parallel.kernels.functions.layer_functions import TORCH

ROWS, BATCH, HEADS, GROUPS, SIZE = 23, 2, 4, 2, 6
WINDOWS = (0, 1, 3, 7, 22, 40)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def operands(rows: int, size: int) -> list[Tensor]:
    """Queries, keys, values and sinks."""
    shapes = [(rows, BATCH, heads, size) for heads in (HEADS, GROUPS, GROUPS)]
    return [random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate((*shapes, (HEADS,)))]


def masked_softmax(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, rule: AttentionRule, begins: Tensor
) -> Tensor:
    """Return what transformers' eager attention computes, with documents that begin at `begins` [b, s]."""
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
    scores = torch.einsum("ibhd,jbhd->bhij", query, key) * rule.scale
    if rule.cap:
        scores = torch.tanh(scores / rule.cap) * rule.cap
    index = torch.arange(len(query))
    sees = (index <= index[:, None]) & (index >= begins[:, :, None])
    if rule.window:
        sees &= index > index[:, None] - rule.window
    scores = scores.masked_fill(~sees[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    chances = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("bhij,jbhd->ibhd", chances, value)


def test_tiles_cover_the_band_once() -> None:
    chosen = Random(1)
    for _ in range(2000):
        queries, keys = chosen.randint(1, 12), chosen.randint(1, 12)
        distance, window = chosen.randint(0, 14), chosen.randint(0, 16)
        most_rows, most_columns = chosen.choice(((0, 0), (1, 5), (3, 5), (5, 5), (3, 0)))
        covered = torch.zeros(queries, keys, dtype=torch.int)
        for rows, columns, mask, _ in band_tiles(queries, keys, distance, window, most_rows, most_columns):
            tile = torch.ones_like(covered[rows, columns])
            assert tile.shape == (rows.stop - rows.start, columns.stop - columns.start) and tile.numel()
            assert mask == "none" or tile.shape[0] == tile.shape[1]
            assert not most_rows or len(tile) <= most_rows
            assert not most_columns or mask != "none" or tile.shape[1] <= max(most_columns, most_rows)
            covered[rows, columns] += {"none": tile, "causal": tile.tril(), "reversed": tile.triu()}[mask]
        i, j = torch.arange(queries)[:, None] + distance, torch.arange(keys)
        sees = (j <= i) & (j > i - window) if window else j <= i
        assert torch.equal(covered, sees.int()), (queries, keys, distance, window)


@pytest.mark.parametrize("cap", [0.0, 0.7])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_values_and_gradients_are_those_of_softmax(cap: float, has_sinks: bool, packed: bool) -> None:
    documents, begins = None, torch.zeros(BATCH, ROWS, dtype=torch.int64)
    if packed:
        tokens = torch.ones(BATCH, ROWS, dtype=torch.int64)
        tokens[0, [0, 1, 14]] = 0
        documents = Documents.of(tokens, 0)
        begins = torch.arange(ROWS) - documents.places
    for window in WINDOWS:
        rule = AttentionRule(0.6, window, cap)
        query, key, value, sinks = operands(ROWS, SIZE)
        leaves = [query, key, value, *([sinks] if has_sinks else [])]
        expected = masked_softmax(query, key, value, sinks if has_sinks else None, rule, begins)
        inputs = AttentionInputs(*leaves, documents=documents)
        found = blockwise_attention(inputs, rule)
        torch.testing.assert_close(found, expected)
        direction = random(*expected.shape, seed=7)
        torch.testing.assert_close(
            torch.autograd.grad(found, leaves, direction), torch.autograd.grad(expected, leaves, direction)
        )


@pytest.mark.parametrize("cap", [0.0, 0.7, 50.0])
@pytest.mark.parametrize("packed", [False, True])
def test_compiled_functions_compute_the_same(cap: float, packed: bool) -> None:
    functions = CompiledFunctions(open_library(compile_functions()))
    documents = None
    if packed:
        tokens = torch.ones(BATCH, 150, dtype=torch.int64)
        tokens[0, [0, 1, 14, 80]] = 0
        documents = Documents.of(tokens, 0)
    leaves = [each.detach().float().requires_grad_() for each in operands(150, 24)]
    direction = random(150, BATCH, HEADS, 24, seed=7).float()
    for window in (0, 1, 31, 32, 33, 64, 65, 100, 150, 200):
        rule, sinks = AttentionRule(0.6, window, cap), leaves[3] if window % 2 else None
        results = []
        for by in (functions, TORCH):
            output = by.attend(AttentionInputs(*leaves[:3], sinks, documents=documents), rule)
            used = leaves if sinks is not None else leaves[:3]
            results.append([output, *torch.autograd.grad(output, used, direction)])
        torch.testing.assert_close(*results, rtol=2e-5, atol=2e-5)


def test_long_windows_are_cut_into_rows() -> None:
    query, key, value = (random(300, 1, 2, 2, seed=seed).requires_grad_() for seed in range(3))
    rule, direction = AttentionRule(0.6, 150), random(300, 1, 2, 2, seed=7)
    assert max(tile.queries.stop - tile.queries.start for tile in rule.tiles(query, 300, 300)) == 128
    assert (
        max(tile.queries.stop - tile.queries.start for tile in rule.tiles(query.bfloat16(), 300, 300)) == 150
    )
    expected = masked_softmax(query, key, value, None, rule, torch.zeros(1, 300))
    found = blockwise_attention(AttentionInputs(query, key, value), rule)
    for one, other in zip(
        torch.autograd.grad(found, (query, key, value), direction),
        torch.autograd.grad(expected, (query, key, value), direction),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_long_capped_attention_is_cut_into_pieces() -> None:
    query, key, value = (random(1100, 1, 1, 2, seed=seed).float() for seed in range(3))
    rule = AttentionRule(0.6, 0, 2.0)
    assert max(tile.keys.stop - tile.keys.start for tile in rule.tiles(query, 1100, 1100)) == 512
    expected = masked_softmax(query, key, value, None, rule, torch.zeros(1, 1100))
    found = blockwise_attention(AttentionInputs(query, key, value), rule)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
