"""Deck in the state of a checkpoint, from which a run resumes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.data.epochs import EpochReader
from hpctrain.deck.code import CodeTrust, Overrides
from hpctrain.deck.read import parse_stored_deck
from hpctrain.deck.schema import Deck, require_trusted_code
from hpctrain.deck.toml_text import deck_text
from hpctrain.errors import HpctrainError
from hpctrain.host.launcher import launched_rank

DEFAULTS_FOLLOW = "deck_defaults_follow"
"""Key of the state that is true if the deck leaves out keys whose defaults follow from other keys."""


def deck_state(deck: Deck) -> dict[str, Any]:
    """Return the keys of a checkpoint's state that store a deck."""
    return {"deck": deck_text(deck), DEFAULTS_FOLLOW: True}


def stored_deck_text(state: Mapping[str, Any], path: Path) -> str:
    """Return the text of the deck in a checkpoint's state.

    Raises:
        HpctrainError: There is none.
    """
    text = state.get("deck")
    if not isinstance(text, str):
        raise HpctrainError(f"{path}: contains no deck, so it is not a checkpoint of a training run")
    return text


def stored_deck(
    state: Mapping[str, Any],
    path: Path,
    overrides: Sequence[str] = (),
    trust: CodeTrust = CodeTrust(),  # noqa: B008 - nothing is trusted
) -> Deck:
    """Return the deck in a checkpoint's state, changed by `--set` arguments.

    Code that the deck names may be called only if `overrides` name it or `trust` has it. The caller calls
    `require_trusted` before that. Keys with default values are computed again from the changed deck. In older
    files, these are the keys whose values equal their defaults.

    Args:
        state: State of the checkpoint.
        path: The checkpoint, for messages.
        overrides: Arguments of `--set`, such as "run.steps=10".
        trust: Code that may be called.

    Raises:
        HpctrainError: The deck is not valid; the message names the file, as "its deck".
    """
    return parse_stored_deck(
        stored_deck_text(state, path),
        Overrides.of(overrides, trust),
        name=f"{path.name}, its deck",
        read_source=EpochReader(),
        completed=(int(state.get("step", 0)), int(state.get("samples", 0))),
        defaults_written=not state.get(DEFAULTS_FOLLOW),
    )


def require_trusted(deck: Deck, path: Path, trust: CodeTrust) -> None:
    """Raise `UntrustedCodeError` if the deck stored in `path` names code that may not be called.

    Otherwise log the code that may be called only because of --trust-code, on the first rank and once per
    file.
    """
    require_trusted_code(deck, f"{path}: its deck")
    trusted = deck.sources.trusted_code
    if trust.everything and trusted and str(path) not in trust.logged_files:
        trust.logged_files.add(str(path))
        if launched_rank(os.environ) == 0:
            names = ", ".join(map(str, sorted(trusted)))
            logging.getLogger("hpctrain").warning("--trust-code: %s may run %s", path, names)
