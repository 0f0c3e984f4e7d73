"""The pieces in which the head's products come."""

from __future__ import annotations

import pytest
import torch

from hpctrain.parallel import vocabulary

VOCABULARY, HIDDEN = 37, 8


def test_chunks_are_even_and_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", 1000)
    monkeypatch.setattr(vocabulary, "CHUNK_ROWS", 4)
    assert vocabulary.chunk_rows(512, 10) == 86  # six chunks, of at most 100
    assert vocabulary.chunk_rows(30, 10) == 30
    assert vocabulary.chunk_rows(9, 5000) == 3  # three chunks, of at most 4
    assert vocabulary.chunk_rows(0, 10) == 1


@pytest.mark.parametrize("block", [1, 7, VOCABULARY])
def test_products_by_blocks_are_the_products(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(vocabulary, "BLOCK_ROWS", block)
    hidden, table = torch.randn(5, HIDDEN), torch.randn(VOCABULARY, HIDDEN)
    torch.testing.assert_close(vocabulary.products(hidden, table), hidden @ table.t())
    half = vocabulary.products(hidden.bfloat16(), table.bfloat16())
    torch.testing.assert_close(half, hidden.bfloat16() @ table.bfloat16().t())
