"""Tests of deck/toml_text.py: a deck of dictionaries equals the same deck in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.deck.read import parse_deck
from hpctrain.deck.toml import parse_toml
from hpctrain.deck.toml_text import tables_to_toml
from hpctrain.errors import HpctrainError
from tests.engines import DECK


def test_sections_and_dotted_names_make_one_deck() -> None:
    given: dict[str, Any] = {
        "run": {"steps": np.int64(20), "title": None},
        "model": {"family": "gpt2", "layers": 2, "hidden": 32, "heads": 8, "vocabulary": 61},
        "model.initial_std": np.float32(0.5),
        "data.tokens": Path("none"),
        "batch": {"global_size": 8, "micro_size": 2, "sequence": 32},
        "learning_rate": {"peak": 1e-2, "warmup": 2},
        "communication": {"bucket_bytes": 20000},
        "machine": {"compile": False},
    }
    assert parse_deck(tables_to_toml(given)) == parse_deck(DECK, ["model.initial_std=0.5"])


@pytest.mark.parametrize(
    "given",
    [
        {"optimizer.muon.momentum": 0.9, "optimizer": {"name": "muon", "muon": {"nesterov": False}}},
        {
            "optimizer": {"name": "muon", "muon": {"momentum": 0.5, "nesterov": False}},
            "optimizer.muon.momentum": 0.9,
        },
        {"optimizer.name": "muon", "optimizer.muon": {"momentum": 0.9}, "optimizer.muon.nesterov": False},
    ],
)
def test_full_names_of_keys_in_tables_are_tables(given: dict[str, Any]) -> None:
    muon = {"momentum": 0.9, "nesterov": False}
    assert parse_toml(tables_to_toml(given))[0] == {"optimizer": {"name": "muon", "muon": muon}}
    deck = parse_toml(DECK)[0]
    overrides = ["optimizer.name=muon", "optimizer.muon.momentum=0.9", "optimizer.muon.nesterov=false"]
    assert parse_deck(tables_to_toml(deck | given)) == parse_deck(DECK, overrides)


def test_a_key_in_a_table_that_is_none_is_left_out() -> None:
    given = {
        "optimizer.muon.momentum": 0.9,
        "model.experts.count": None,
        "run": {"steps": 3},
        "run.steps": None,
    }
    assert parse_toml(tables_to_toml({**given, "optimizer.muon.momentum": None}))[0] == {
        "run": {},
        "optimizer": {},
        "model": {},
    }


def test_values_survive_a_round_trip() -> None:
    given = {
        "layout": "auto",
        "model": {"frozen": ["a*", 'q"uote'], "arguments": {"a b": {"deep": [1, True]}}},
        "evaluation": [{"name": "one", "tokens": "a.h5"}, {"name": "two"}],
    }
    assert parse_toml(tables_to_toml(given))[0] == given


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"run": {"steps": object()}}, r"^run\.steps: an object cannot be a value of a deck"),
        ({"run.steps": {1}}, r"^run\.steps: a set cannot be"),
        ({3: 4}, "^the deck: must have names of sections or keys"),
        ({"evaluation": [{"name": lambda: 3}]}, "^evaluation.name: a function cannot be"),
        ({"run": {"notes": [None]}}, r"^run\.notes: None cannot be"),
    ],
)
def test_values_that_toml_does_not_have_are_errors(tables: Any, message: str) -> None:
    with pytest.raises(HpctrainError, match=message):
        tables_to_toml(tables)
