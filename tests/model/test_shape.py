"""Which blocks of a model are mixtures of experts, and of which kind its layers are."""

from __future__ import annotations

import pytest

from hpctrain.model.construction import layer_kinds
from hpctrain.model.part import LayerKind
from hpctrain.model.shape import ModelShape
from tests.engines import LLAMA, small_deck


@pytest.mark.parametrize(
    ("every", "dense_first", "mixtures"),
    [(1, 0, [0, 1, 2, 3, 4, 5, 6]), (2, 0, [1, 3, 5]), (3, 0, [2, 5]), (3, 4, [5]), (1, 5, [5, 6])],
)
def test_every_so_many_blocks_the_last_one_is_a_mixture(
    every: int, dense_first: int, mixtures: list[int]
) -> None:
    """As `decoder_sparse_step` of Qwen counts, from 1; the first `dense_first` blocks are none."""
    keys = "model.layers=7", "model.experts.count=4", f"model.experts.every={every}"
    deck = small_deck(*LLAMA, *keys, f"model.experts.dense_first={dense_first}", "model.experts.mlp=8")
    assert list(filter(ModelShape.of(deck, 61).is_mixture, range(7))) == mixtures


def test_a_pattern_names_the_mixtures() -> None:
    keys = "model.layers=7", "model.experts.count=4", "model.experts.pattern=[true,false,false]"
    deck = small_deck(*LLAMA, *keys, "model.experts.mlp=8")
    assert list(filter(ModelShape.of(deck, 61).is_mixture, range(7))) == [0, 3, 6]


def test_kinds_of_layers() -> None:
    experts = "model.experts.count=4", "model.experts.mlp=8", "model.experts.dense_first=3"
    patterns = "model.windows=[0,4,0,4]", "model.rotation_pattern=[true,false,false,true]"
    kinds = layer_kinds(ModelShape.of(small_deck(*LLAMA, "model.layers=4", *experts, *patterns), 61))
    assert list(map(str, kinds)) == [
        "embedding", "block", "window 4 unrotated block", "unrotated block", "window 4 mixture", "head",
    ]  # fmt: skip
    assert kinds[4] == LayerKind("mixture", window=4)
