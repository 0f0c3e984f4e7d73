"""Whatever stands in a deck, reading it gives a deck or sentences."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as some

from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.toml_text import deck_text
from hpctrain.errors import HpctrainError
from hpctrain.plan.memory_plan import plan_memory
from tests.deck.any_deck import RIGHT, arguments, decks, raw

SMALL = "\n".join(
    line
    for section, table in RIGHT.items()
    for line in (f"[{section}]", *(f"{key} = {value}" for key, value in table.items()))
)

MANY = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def read(text: str, overrides: list[str], ranks: int | None = None) -> Deck | None:
    """The deck, which printed is the same deck; None where there is none, for reasons that can be read."""
    try:
        deck = parse_deck(text, overrides, ranks=ranks)
    except HpctrainError as error:
        told = error.problems
    else:
        told = ()
    if told:
        assert all(0 < len(problem) < 2000 for problem in told), told
        return None
    assert parse_deck(deck_text(deck, ranks)) == deck
    if ranks is not None and deck.model.layers <= 8 and deck.batch.global_size <= 512:
        with suppress(HpctrainError):
            plan_memory(deck, ranks, deck.model.vocabulary or 257, 0, ranks)
    return deck


def try_changes(count: int) -> None:
    @settings(MANY, max_examples=count)
    @given(decks(), some.lists(arguments, max_size=2), some.sampled_from([None, None, 1, 6, 4096]))
    def changes(text: str, overrides: list[str], ranks: int | None) -> None:
        read(text, overrides, ranks)

    changes()


def test_any_change_of_a_deck() -> None:
    try_changes(200)


@pytest.mark.slow
def test_twelve_hundred_changes_of_a_deck() -> None:
    try_changes(1200)


@settings(MANY, max_examples=300)
@given(raw)
@example('"\\UFFFFFFFF" = 1')
@example('a = "\\ud800"\na = 1')
def test_any_text(text: str) -> None:
    read(text, [])
