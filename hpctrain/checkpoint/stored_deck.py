"""The deck that a checkpoint holds, which is all that a restart needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.data.epochs import EpochReader
from hpctrain.deck.read import deck_text, parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError

FOLLOWING = "deck_defaults_follow"
"""In a state: whether its deck leaves out the keys that defaulted from others; else it has them all."""


def deck_state(deck: Deck) -> dict[str, Any]:
    """What the state of a checkpoint tells of its deck."""
    return {"deck": deck_text(deck), FOLLOWING: True}


def stored_deck_text(state: Mapping[str, Any], path: Path) -> str:
    """The text of the deck in a checkpoint's state; HpctrainError where there is none."""
    text = state.get("deck")
    if not isinstance(text, str):
        raise HpctrainError(f"{path}: holds no deck, so it is no checkpoint of a training run")
    return text


def stored_deck(state: Mapping[str, Any], path: Path, overrides: Sequence[str] = ()) -> Deck:
    """The deck itself, with `--set` arguments on top; HpctrainErrors name the file, as "its deck".

    A key that defaulted follows the others as they are with the arguments. Where the file does not tell which
    ones did, those count that have the values they would get.
    """
    text = stored_deck_text(state, path)
    return parse_deck(
        text,
        overrides,
        name=f"{path.name}, its deck",
        read_source=EpochReader(),
        includes=False,
        defaults_written=not state.get(FOLLOWING),
        begun=(int(state.get("step", 0)), int(state.get("samples", 0))),
    )
