"""What a deck with a module may have, and what it does not go with. Tests of deck/sections/data.py, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.deck.read import parse_deck, read_deck
from hpctrain.deck.toml_text import deck_text
from hpctrain.errors import HpctrainError

DECK = """
[run]
title = "mine"
steps = 10
[model]
module = "code/mine.py:build"
[model.arguments]
hidden = 32
"odd name" = [1, 2.5, "x"]
[data]
tokens = "none"
[batch]
global_size = 8
sequence = 32
[learning_rate]
peak = 1e-2
"""


def problems(*overrides: str) -> list[str]:
    with pytest.raises(HpctrainError) as caught:
        parse_deck(DECK, overrides)
    return [each.partition(": ")[2] for each in caught.value.problems]


def test_a_deck_with_a_module_needs_no_sizes_and_shows_none(tmp_path: Path) -> None:
    (tmp_path / "deck.toml").write_text(DECK)
    deck = read_deck(tmp_path / "deck.toml")
    assert deck.model.module == f"{tmp_path}/code/mine.py:build"
    assert deck.model.arguments == {"hidden": 32, "odd name": [1, 2.5, "x"]}
    text = deck_text(deck)
    assert "layers" not in text and "heads" not in text and "router" not in text
    again = parse_deck(text)
    assert again == deck and deck_text(again) == text


def test_a_package_is_the_same_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "deck.toml").write_text(DECK)
    deck = read_deck(tmp_path / "deck.toml", ["model.module=package.mine:build", "model.loss=a.py:loss"])
    assert (deck.model.module, deck.model.loss) == ("package.mine:build", f"{tmp_path}/a.py:loss")


@pytest.mark.parametrize("key", ["layers=2", "hidden=8", "family=gpt2", "preset=gpt2-124m", "dropout=0.1"])
def test_sizes_of_built_in_models_are_refused(key: str) -> None:
    assert problems(f"model.{key}") == [
        "has no effect with model.module (leave it out, or use [model.arguments])"
    ]


@pytest.mark.parametrize("key", ["context", "expert"])
def test_axes_that_come_later_are_refused_in_a_sentence(key: str) -> None:
    (told,) = problems(f"layout.{key}=2")[:1]
    assert told.endswith("(use 1)")


@pytest.mark.parametrize(
    "change",
    [
        "layout.local_steps.replicas=2",
        "memory.activations=disk",
        "memory.activation_format=int8",
        "communication.compress=int8",
        "data.document_mask=true",
        "machine.compile=true",
        "run.noise_scale_steps=5",
        "precision.compute=fp8",
        "memory.recompute=sqrt",
        "memory.recompute=full",
    ],
)
def test_what_a_module_does_not_go_with_is_refused_in_a_sentence(change: str) -> None:
    assert any("module" in told or "model.blocks" in told for told in problems(change))


def test_tensor_ranks_need_a_plan() -> None:
    (told,) = problems("layout.tensor=2")
    expected = 'requires model.plan for a module (models of transformers may use "its own")'
    assert told == expected
    parse_deck(DECK, ['model.plan={"layers.*.q" = "column"}', "layout.tensor=2"])
    assert parse_deck(DECK, ["model.plan=its own", "layout.tensor=2"]).model.plan == "its own"
    (told,) = problems("model.plan=mine")
    assert told == 'must be a table or "its own"'


def test_sequences_are_cut_over_several_ranks_evenly() -> None:
    (told,) = problems("layout.sequence_parallel=true")
    assert "requires layout.tensor above 1" in told
    (told,) = problems("model.plan=its own", "layout.tensor=3", "layout.sequence_parallel=true")
    assert told.startswith(
        "batch.sequence = 32: must be a multiple of layout.tensor = 3 with layout.sequence_parallel ("
    )
    pieces = "layout.tensor=2", "layout.sequence_parallel=true", "model.plan=its own"
    (told,) = problems(*pieces, "data.tokens=", "batch.sequence=", "data.dataset=m.py:Samples")
    assert told == "conflicts with data.dataset: it splits the sequences of token files"


def test_stages_are_cut_between_blocks() -> None:
    told = 'requires model.blocks, which names the blocks of a module (such as "layers.*")'
    assert problems("layout.pipeline=2") == [told]
    blocks = "model.blocks=layers.*", "layout.pipeline=2"
    assert parse_deck(DECK, [*blocks, "layout.split=[3, 0]", "layout.schedule=zb-h1"]).layout.split == (3, 0)
    for split in ("[0, 3]", "[1, 2, 3]", "[2, -1]"):
        (told,) = problems(*blocks, f"layout.split={split}")
        assert told.startswith("must give 1 block or more to each of the 2 parts of layout.pipe")
    pieces = "layout.sequence_parallel=true", "layout.tensor=2", "model.plan=its own"
    (told,) = problems(*blocks, *pieces)
    assert told.startswith("is unsupported with layout.pipeline above 1")
    (told,) = problems(*blocks, "layout.schedule=zb-v", "layout.chunks=1")
    assert told == 'must be 2 with layout.schedule = "zb-v"'


def test_what_is_no_target_is_refused() -> None:
    expected = 'must be "FILE.py:FUNCTION" or "PACKAGE:FUNCTION"'
    assert problems("model.module=mine.py") == [expected]
    assert problems("model.loss=mine.py:a b") == [expected]


def test_keys_of_modules_are_refused_without_one() -> None:
    sentence = "requires model.module, which is not given"
    ours = ("model.module=", "model.preset=gpt2-124m", "model.arguments=")
    assert problems(*ours, "model.blocks=layers.*") == [sentence]
    assert problems(*ours, "model.buffers=first") == [sentence]


def test_matrices_that_a_plan_cuts_are_not_updated_whole() -> None:
    plan = 'model.plan={"a" = "column"}', "layout.tensor=2"
    assert any("updates whole matrices" in told for told in problems("optimizer.name=muon", *plan))
    for right in (("optimizer.name=adamw", *plan), ("optimizer.name=adafactor",)):
        parse_deck(DECK, right)
