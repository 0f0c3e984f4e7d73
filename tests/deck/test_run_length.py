"""Runs whose length is told in tokens or epochs: the steps that take them, and what goes with what."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from hpctrain.deck.read import parse_deck, read_deck
from hpctrain.deck.run_length import steps_for_samples
from hpctrain.deck.schema import Deck
from hpctrain.deck.toml_text import deck_text
from hpctrain.train.batch_size import batch_at, samples_of
from tests.deck.small_text import SMALL, changed, problems


class Reader:
    """Tokens of 100 sequences."""

    def __call__(self, path: str) -> dict[str, object]:
        return {}

    def sequences(self, deck: Deck) -> int:
        return 100


@settings(max_examples=300, deadline=None)
@given(some.integers(1, 3000), some.integers(1, 40), some.integers(0, 40), some.integers(0, 60))
def test_steps_are_the_fewest_that_take_the_samples(samples: int, size: int, ramp: int, steps: int) -> None:
    ramp = ramp if ramp <= size and steps else 0
    changes = [
        f"batch.global_size={size}",
        f"batch.ramp_from={ramp}",
        f"batch.ramp_steps={steps if ramp else 0}",
    ]
    batch = parse_deck(SMALL, changes).batch
    found = steps_for_samples(samples, size, batch.ramp_from, batch.ramp_steps)
    assert samples_of(batch, found) >= samples > samples_of(batch, found - 1)


def test_tokens_make_steps_which_follow_the_batch() -> None:
    deck = parse_deck(changed("steps = 20", "tokens = 1e6"))
    assert deck.run.tokens == 1_000_000 and deck.run.steps == 1954  # of 8 x 64 tokens
    assert deck.learning_rate.decay_steps == 1954 and deck.learning_rate.warmup == 100
    text = deck_text(deck)
    assert "\n# steps = 1954  # " in text and "\ntokens = 1000000\n" in text
    assert parse_deck(text, ["batch.global_size=16"], name="other.toml").run.steps == 977


def test_what_a_run_has_taken_counts() -> None:
    """10 steps of 8 sequences of 64 tokens, of 12,000 tokens; then others take 16 at a time."""
    text = deck_text(parse_deck(changed("steps = 20", "tokens = 12000")))
    same = parse_deck(text, completed=(10, 80))
    assert same.run.steps == 24 == parse_deck(text).run.steps
    larger = parse_deck(text, ["batch.global_size=16"], completed=(10, 80))
    assert larger.run.steps == 10 + 7  # 108 sequences are left
    assert larger.learning_rate.decay_steps == 17
    again = deck_text(larger)
    assert "\n# steps = 17  # " in again
    assert parse_deck(again, completed=(12, 112)).run.steps == 17
    assert parse_deck(again, ["batch.sequence=32"], completed=(12, 112)).run.steps == 12 + 10  # 151 half ones
    assert parse_deck(text, ["run.tokens=5632"], completed=(12, 96)).run.steps == 11  # it has gone beyond
    ramp = ("batch.ramp_from=4", "batch.ramp_steps=6")
    grown = parse_deck(text, ramp, completed=(2, 8)).batch, parse_deck(text, ramp, completed=(2, 8)).run.steps
    taken = 8 + sum(batch_at(grown[0], step) for step in range(2, grown[1]))
    assert 0 <= taken - 188 < 8
    assert parse_deck(text, completed=(10, 80)) == parse_deck(text)


def test_epochs_become_steps(tmp_path: Path) -> None:
    (tmp_path / "deck.toml").write_text(changed("steps = 20", "epochs = 2.5"))
    deck = read_deck(tmp_path / "deck.toml", [], None, Reader())
    assert deck.run.epochs is None and deck.run.steps == 32  # 250 sequences, 8 a step
    assert "\nsteps = 32\n" in deck_text(deck)
    assert deck.problem("run.steps", "x").endswith("deck.toml:2: run.steps = 32 (from run.epochs): x")
    assert read_deck(tmp_path / "deck.toml", ["run.steps=3"], None, Reader()).run.steps == 3
    more = ["run.epochs=3", "batch.global_size=16"]
    begun = parse_deck(deck_text(deck), more, read_source=Reader(), completed=(10, 80))
    assert begun.run.steps == 10 + 14  # 220 of 300 sequences are left


def test_another_length_replaces_it(tmp_path: Path) -> None:
    assert parse_deck(SMALL, ["run.tokens=5120"]).run.steps == 10
    (tmp_path / "base.toml").write_text(SMALL)
    (tmp_path / "deck.toml").write_text('include = "base.toml"\n[run]\ntokens = 5121\n')
    assert read_deck(tmp_path / "deck.toml").run.steps == 11
    assert read_deck(tmp_path / "deck.toml", ["run.steps=4"]).run.tokens is None


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (
            "steps = 20\ntokens = 9",
            "deck.toml:3: run.tokens = 9: conflicts with run.steps: both give the length of the run (leave",
        ),
        (
            "tokens = 9\nepochs = 9",
            "deck.toml:3: run.epochs = 9: conflicts with run.tokens: both give the length of the run (leave",
        ),
        (
            "epochs = 2",
            "deck.toml:2: run.epochs = 2: requires token files whose sequences can be counted (use",
        ),
        ("epochs = 0", "deck.toml:2: run.epochs = 0: must be a number above 0"),
        ("epochs = nan", "deck.toml:2: run.epochs = nan: must be a number above 0"),
        ("tokens = 1e300", "deck.toml:2: run.tokens = 1e+300: must be "),
        ("tokens = 0", "deck.toml:2: run.tokens = 0: must be a whole number from 1 to 1000000000000000000"),
        (
            "tokens = 1.5",
            "deck.toml:2: run.tokens = 1.5: must be a whole number from 1 to 1000000000000000000, not a ",
        ),
        (
            'tokens = "9"',
            'deck.toml:2: run.tokens = "9": must be a whole number from 1 to 1000000000000000000, not text',
        ),
        (
            "seed = 1",
            "deck.toml:1: run.steps is missing: a whole number of at least 1 of optimizer steps (or "
            "give run.tokens",
        ),
    ],
)
def test_wrong_lengths(lines: str, told: str) -> None:
    (sentence,) = problems(changed("steps = 20", lines))
    assert sentence.startswith(told), sentence
