"""Keys of a config.json for dropout and noise in training: named at the start, and exported unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoint.exchange.convert import export_model, import_model
from hpctrain.checkpoint.exchange.hugging_face.architectures import LANGUAGE_MODELS
from hpctrain.checkpoint.exchange.source import read_source_keys
from hpctrain.comm.world import World
from hpctrain.deck.read import parse_deck
from hpctrain.train.start import source_notes
from tests.checkpoint.exchange.test_families import reference

transformers = pytest.importorskip("transformers")

DECK = """
[run]
steps = 1
[model]
from = "{source}"
[data]
tokens = "none"
[batch]
global_size = 1
"""
OTHER_HEADS = {"classifier_dropout", "summary_first_dropout"}
"""Keys for the dropout of heads that hpctrain does not have."""


@pytest.mark.parametrize("name", [each.name for each in LANGUAGE_MODELS])
def test_all_keys_of_transformers_are_known_with_their_defaults(name: str) -> None:
    files = next(each.files for each in LANGUAGE_MODELS if each.name == name)
    defaults = getattr(transformers, name).config_class().to_dict()
    parts = ("drop", "jitter", "noise")
    found = {key: value for key, value in defaults.items() if any(part in key for part in parts)}
    assert {**files.dropouts, **files.training_noise} == {
        key: value for key, value in found.items() if key not in OTHER_HEADS
    }


@pytest.mark.parametrize(
    ("name", "keys", "replaced", "others"),
    [
        (
            "phi3",
            {"resid_pdrop": 0.1, "attention_dropout": 0.2},
            "resid_pdrop = 0.1",
            "attention_dropout = 0.2",
        ),
        ("llama-mixtral", {"router_jitter_noise": 0.3}, "", "router_jitter_noise = 0.3"),
        ("starcoder2", {"embedding_dropout": 0.25}, "embedding_dropout = 0.25", ""),
        ("gpt2", dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop")), "", ""),
        ("llama", {}, "", ""),
    ],
)
def test_keys_that_training_ignores_are_named_and_kept(
    name: str, keys: dict[str, Any], replaced: str, others: str, world: World, tmp_path: Path
) -> None:
    theirs, model = tmp_path / "theirs", tmp_path / "model.h5"
    reference(name, **{key: value or 0.0 for key, value in keys.items()}).save_pretrained(theirs)
    told = [f"{replaced} (set model.dropout instead)"] if replaced else []
    told += [f"{others} (hpctrain has no equivalent)"] if others else []
    note = [f"{theirs}/config.json: training ignores {' and '.join(told)}"] if told else []
    assert import_model(world, theirs, model).splitlines()[:-1] == note
    for source, where in ((theirs, f"{theirs}/config.json"), (model, f"{model}: config.json")):
        deck = parse_deck(DECK.format(source=source), read_source=read_source_keys)
        notes = [each.replace(f"{theirs}/config.json", where) for each in note]
        assert source_notes(world, deck) == notes
        dropped = parse_deck(DECK.format(source=source), ["model.dropout=0.1"], read_source=read_source_keys)
        assert source_notes(world, dropped) == ([f"{where}: training ignores {told[-1]}"] if others else [])
    export_model(world, model, tmp_path / "ours", None, 10**9)
    config = json.loads((tmp_path / "ours/config.json").read_text())
    expected = json.loads((theirs / "config.json").read_text())
    assert {key: config[key] for key in keys} == {key: expected[key] for key in keys}


def test_missing_keys_have_the_defaults_of_transformers(world: World, tmp_path: Path) -> None:
    reference("gpt2").save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in config.items() if not key.endswith("_pdrop")}))
    note, _ = import_model(world, tmp_path / "theirs", tmp_path / "model.h5").splitlines()
    told = "embd_pdrop = 0.1, resid_pdrop = 0.1 (set model.dropout instead) and attn_pdrop = 0.1 (hpctrain"
    assert told in note
    export_model(world, tmp_path / "model.h5", tmp_path / "ours", None, 10**9)
    exported = json.loads((tmp_path / "ours/config.json").read_text())
    assert [exported[key] for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")] == [0.1, 0.1, 0.1]
