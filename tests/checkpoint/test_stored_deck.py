from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.checkpoint.stored_deck import deck_state, stored_deck, stored_deck_text
from hpctrain.deck.read import parse_deck
from hpctrain.errors import HpctrainError
from tests.deck.test_read import SMALL

PATH = Path("step-00000020.h5")


def test_what_defaulted_follows_and_what_was_given_stays() -> None:
    given = parse_deck(SMALL, ["learning_rate.decay_steps=20"])
    assert stored_deck(deck_state(given), PATH) == given
    rate = stored_deck(deck_state(given), PATH, ["run.steps=600"]).learning_rate
    assert (rate.warmup, rate.decay_steps) == (2, 20)
    rate = stored_deck(deck_state(parse_deck(SMALL)), PATH, ["run.steps=600"]).learning_rate
    assert (rate.warmup, rate.decay_steps) == (60, 600)


def test_files_that_hold_all_defaults_follow_where_the_values_are_those_of_the_defaults() -> None:
    lines = deck_state(parse_deck(SMALL))["deck"].splitlines()
    text = "\n".join(line.removeprefix("# ") if "  # " in line else line for line in lines)
    assert "\nwarmup = 2 " in text
    state = {"deck": text.replace("\nwarmup = 2 ", "\nwarmup = 3 ")}
    deck = stored_deck(state, PATH)
    assert (deck.learning_rate.warmup, deck.learning_rate.decay_steps) == (3, 20)
    deck = stored_deck(state, PATH, ["run.steps=600"])
    assert (deck.learning_rate.warmup, deck.learning_rate.decay_steps) == (3, 600)


def test_a_file_without_a_deck_is_told() -> None:
    with pytest.raises(HpctrainError, match="contains no deck"):
        stored_deck_text({}, PATH)
