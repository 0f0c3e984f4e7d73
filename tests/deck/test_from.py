"""Tests of `model.from`: keys that the model settles, and keys that contradict it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from hpctrain.deck.code import CodeTrust, Overrides
from hpctrain.deck.read import parse_deck, read_deck
from hpctrain.deck.reference import reference_text
from hpctrain.deck.sections.rope_scaling import RopeScaling
from hpctrain.deck.toml_text import deck_text
from hpctrain.errors import HpctrainError, InputOutputError

DECK = """\
[run]
steps = 3
[model]
from = "models/small"
[data]
tokens = "tokens.h5"
[batch]
global_size = 2
"""

GPT2: dict[str, object] = {
    "model.family": "gpt2",
    "model.layers": 3,
    "model.hidden": 48,
    "model.heads": 4,
    "model.key_value_heads": 4,
    "model.mlp": 100,
    "model.vocabulary": 97,
    "model.tied": False,
    "model.norm_epsilon": 1e-6,
    "batch.sequence": 64,
}
LLAMA = GPT2 | {"model.family": "llama", "model.rope_base": 5e5, "model.key_value_heads": 2}


class Reader:
    """Stands in for what looks into models, and remembers what it was asked for."""

    def __init__(self, keys: Mapping[str, object]) -> None:
        self.keys, self.asked = keys, []

    def __call__(self, path: str) -> Mapping[str, object]:
        self.asked.append(path)
        return self.keys


def problems(text: str, *overrides: str, keys: Mapping[str, object] = GPT2) -> tuple[str, ...]:
    with pytest.raises(HpctrainError) as caught:
        parse_deck(text, overrides, read_source=Reader(keys))
    return caught.value.problems


@pytest.mark.parametrize("keys", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_keys_that_the_deck_leaves_out_are_those_of_the_model(keys: Mapping[str, object]) -> None:
    reader = Reader(keys)
    deck = parse_deck(DECK, read_source=reader)
    assert reader.asked == ["models/small"]
    assert {key: deck.value(key) for key in keys} == keys
    assert deck.model.source == deck.value("model.from") == "models/small"
    text = deck_text(deck)
    assert 'from = "models/small"\n' in text
    assert parse_deck(text) == deck  # without looking into the model again


def test_from_is_set_and_unset_on_the_command_line() -> None:
    reader = Reader(GPT2)
    deck = parse_deck(DECK, ["model.from=/other place"], read_source=reader)
    assert (deck.model.source, reader.asked) == ("/other place", ["/other place"])
    without = deck_text(deck)
    assert parse_deck(without, ["model.from="]).model.source is None
    assert "# from: none: random weights\n" in deck_text(parse_deck(without, ["model.from="]))


def test_keys_that_contradict_the_model_are_errors() -> None:
    text = DECK.replace("[data]", "layers = 2\nnorm_epsilon = 1e-5\n[data]")
    name = 'model.from = "models/small"'
    assert problems(text) == (
        f"deck.toml:5: model.layers = 2: conflicts with {name}, whose model has 3 (leave this key out)",
        f"deck.toml:6: model.norm_epsilon = 1e-05: conflicts with {name}, whose model has 1e-06 "
        "(leave this key out)",
    )
    assert problems(DECK, "model.tied=true") == (
        f"--set model.tied=true: conflicts with {name}, whose model has false (leave this key out)",
    )
    text = DECK.replace("[data]", 'preset = "gpt2-124m"\n[data]')
    assert (
        f"deck.toml:5: model.layers = 12 (from the preset): conflicts with {name}, whose" in problems(text)[0]
    )
    message = problems(DECK, "layout.tensor=5")[0]
    assert message.startswith("--set layout.tensor=5: must be at most model.heads = 4")


def test_scaled_positions_are_those_of_the_model_or_the_deck_adds_them() -> None:
    scaled = LLAMA | {"model.rope_scaling.kind": "linear", "model.rope_scaling.factor": 2.0}
    deck = parse_deck(DECK, read_source=Reader(scaled))
    assert deck.model.rope_scaling == RopeScaling(kind="linear", factor=2.0)
    added = ["model.rope_scaling.kind=linear", "model.rope_scaling.factor=4", "batch.sequence=256"]
    assert parse_deck(DECK, added, read_source=Reader(LLAMA)).model.rope_scaling is not None
    end = 'conflicts with model.from = "models/small", whose model has 2.0 (leave this key out)'
    assert problems(DECK, *added, keys=scaled) == (f"--set model.rope_scaling.factor=4: {end}",)
    end = 'conflicts with model.from = "models/small", whose model has this table (leave this key out)'
    assert problems(DECK, "model.rope_scaling=none", keys=scaled) == (
        f"--set model.rope_scaling=none: {end}",
    )


def test_vocabularies_grow_and_positions_may_be_fewer() -> None:
    reader = Reader(GPT2)
    deck = parse_deck(DECK, ["model.vocabulary=128", "batch.sequence=32"], read_source=reader)
    assert (deck.model.vocabulary, deck.batch.sequence) == (128, 32)
    name = 'model.from = "models/small"'
    assert problems(DECK, "model.vocabulary=96", "batch.sequence=65") == (
        f"--set model.vocabulary=96: is smaller than the 97 of {name}, whose vocabulary can only grow",
        f"--set batch.sequence=65: is longer than the 64 learned positions of {name}",
    )
    assert parse_deck(DECK, ["batch.sequence=640"], read_source=Reader(LLAMA)).batch.sequence == 640


def test_models_that_cannot_be_read_are_reported_at_their_key(tmp_path: Path) -> None:
    def fail(path: str) -> Mapping[str, object]:
        raise InputOutputError(f"{path}: no such checkpoint")

    path = tmp_path / "deck.toml"
    path.write_text(DECK)
    with pytest.raises(InputOutputError) as caught:
        read_deck(path, read_source=fail)
    assert caught.value.problems == (f"{path}:4: model.from: models/small: no such checkpoint",)
    with pytest.raises(HpctrainError) as caught:
        read_deck(path, ["run.steps=0"], read_source=fail)
    assert caught.value.exit_code == 2 and len(caught.value.problems) == 2
    assert problems(DECK.replace('"models/small"', "7"), keys={})[0] == (
        "deck.toml:4: model.from = 7: must be text in quotes that is not empty, not a number"
    )
    assert problems(DECK.replace("from", "form"))[1] == (
        'deck.toml:4: model.form = "models/small": unknown key (did you mean model.from?)'
    )


def test_the_reference_lists_from() -> None:
    text = reference_text("model")
    assert "\n  from " in text and "source" not in text


def test_a_stored_deck_cannot_include_files(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[run]\nsteps = 3\n")
    text = f'include = "{tmp_path / "base.toml"}"\n' + DECK
    with pytest.raises(HpctrainError, match=r"^deck.toml:1: include: a deck that is stored in a file cannot"):
        parse_deck(text, includes=False, read_source=Reader(GPT2))


MODULE = """
[run]
steps = 3
[model]
module = "transformers:GPT2LMHeadModel"
from = "models/small"
[data]
tokens = "tokens.h5"
[batch]
global_size = 2
sequence = 16
"""


def test_a_class_of_transformers_is_described_by_the_folder_that_it_starts_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the deck has of arguments stays, as does a stored deck that has none."""
    folder = tmp_path / "models/small"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_deck(MODULE).model.arguments is None  # there is no config.json
    (folder / "config.json").write_text("{}")
    deck = parse_deck(MODULE)
    assert deck.model.arguments == {"config": str(folder)}
    assert "(from model.from): no" in deck.problem("model.arguments", "no")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_deck(MODULE, ["model.from=~/models/small"]).model.arguments == {"config": str(folder)}
    assert parse_deck(deck_text(deck)).model.arguments == deck.model.arguments
    assert parse_deck(MODULE, ["model.arguments={n_layer=2}"]).model.arguments == {"n_layer": 2}
    assert parse_deck(MODULE, ["model.module=mine.py:build"]).model.arguments is None
    assert parse_deck(MODULE, Overrides.of((), CodeTrust())).model.arguments is None
