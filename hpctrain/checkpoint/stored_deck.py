"""The deck that a checkpoint holds, which is all that a restart needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError


def stored_deck_text(state: Mapping[str, Any], path: Path) -> str:
    """The text of the deck in a checkpoint's state; HpctrainError where there is none."""
    text = state.get("deck")
    if not isinstance(text, str):
        raise HpctrainError(f"{path}: holds no deck, so it is no checkpoint of a training run")
    return text


def stored_deck(state: Mapping[str, Any], path: Path, overrides: Sequence[str] = ()) -> Deck:
    """The deck itself, with `--set` arguments on top; HpctrainErrors name the file, as "its deck"."""
    text = stored_deck_text(state, path)
    return parse_deck(text, overrides, name=f"{path.name}, its deck", includes=False)
