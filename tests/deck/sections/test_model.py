"""Checks of keys of [model] that concern several layers."""

from __future__ import annotations

import pytest

from hpctrain.deck.read import parse_deck
from hpctrain.errors import HpctrainError
from tests.engines import DECK, LLAMA


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ("model.windows=[4, -1]",),
            "model.windows=[4, -1]: each window must be a positive number of tokens",
        ),
        (("model.windows=[4, 0, 4]",), "model.windows=[4, 0, 4]: has 3 windows, but model.layers = 2"),
        (
            ("model.rotation_pattern=[true, false, true]",),
            "model.rotation_pattern=[true, false, true]: has 3 values, but model.layers = 2",
        ),
        (("model.rope_local_base=300",), "model.rope_local_base=300: has no effect without a layer"),
        (("model.rope_local_base=0",), "model.rope_local_base"),
        (("model.attention_cap=-1",), "model.attention_cap"),
        (("model.query_key_value_clip=-1",), "model.query_key_value_clip=-1: must be a number from 0 to"),
    ],
)
def test_impossible_patterns_of_layers_are_refused(overrides: tuple[str, ...], told: str) -> None:
    with pytest.raises(HpctrainError) as caught:
        parse_deck(DECK, (*LLAMA, *overrides))
    assert told in str(caught.value)


def test_windows_need_rotary_positions_for_a_base() -> None:
    with pytest.raises(HpctrainError, match=r"model\.rope_local_base"):
        parse_deck(DECK, ("model.windows=[4]", "model.rope_local_base=300"))
    assert parse_deck(DECK, ("model.windows=[4]",)).model.windows == (4,)


def test_a_pattern_of_a_family_may_be_longer_than_the_model() -> None:
    """The patterns of Cohere 2 are of four layers, those of Gemma 3 of six; the deck has two layers."""
    model = parse_deck(DECK, (*LLAMA, "model.family=cohere2", "model.tied=false")).model
    assert (len(model.rotation_pattern), len(model.windows), model.layers) == (4, 4, 2)
