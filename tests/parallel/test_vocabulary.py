"""The chunks of tokens that losses are taken of."""

from __future__ import annotations

import pytest

from hpctrain.parallel import vocabulary


def test_chunks_are_even_and_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", 1000)
    monkeypatch.setattr(vocabulary, "CHUNK_ROWS", 4)
    assert vocabulary.chunk_rows(512, 10, False) == 86  # six chunks, of at most 100
    assert vocabulary.chunk_rows(30, 10, False) == 30
    assert vocabulary.chunk_rows(9, 5000, False) == 3  # three chunks, of at most 4
    assert vocabulary.chunk_rows(0, 10, False) == 1
