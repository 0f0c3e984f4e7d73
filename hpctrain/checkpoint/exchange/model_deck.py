"""Deck in the checkpoint of an imported model, which has no training run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import toml_value


def model_only_deck(
    model: Mapping[str, Any], sequence: int, out: Path, folder: Path, rewards: bool = False
) -> Deck:
    """Return a deck of an imported model, with placeholders for the other required keys.

    Args:
        model: Keys of the section [model], by their names in it, such as "latent.query".
        sequence: Longest sequence of the model.
        out: The checkpoint, whose name is the title of the run.
        folder: Hugging Face folder of the model, for messages.
        rewards: True for a reward model.
    """
    lines = ["[run]", f"title = {toml_value(out.stem or 'model')}", "steps = 1", "[model]"]
    lines += [f"{name} = {toml_value(value)}" for name, value in model.items()]
    lines += ["[data]", 'tokens = "tokens.h5"', "[batch]", f"sequence = {sequence}"]
    pairs = ["global_size = 2", "micro_size = 2", "[objective]", 'kind = "reward"']
    lines += pairs if rewards else ["global_size = 1"]
    return parse_deck("\n".join(lines) + "\n", name=f"{folder}: deck", includes=False)
