"""Functions that read and write the tokenizer and its settings in the state of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.data.tokenizer import Tokenizer
from hpctrain.data.tokenizer_settings import SETTINGS, TokenizerSettings

TOKENIZER = "tokenizer"
"""Key of the state that holds the tokenizer's text."""


def stored_settings(state: Mapping[str, Any]) -> TokenizerSettings:
    """Return the tokenizer settings in a checkpoint's state; older checkpoints have empty ones."""
    return TokenizerSettings.from_object(state.get(SETTINGS))


def tokenizer_of_state(state: Mapping[str, Any], path: Path) -> Tokenizer | None:
    """Return the tokenizer in a checkpoint's state; None if it has none.

    Args:
        state: State of the checkpoint.
        path: The checkpoint, for messages.

    Raises:
        HpctrainError: the stored text is not a usable tokenizer.
    """
    text = state.get(TOKENIZER)
    if not isinstance(text, str):
        return None
    return Tokenizer(text, f"{path}: tokenizer", stored_settings(state))


def tokenizer_state(text: str | None, settings: TokenizerSettings) -> dict[str, Any]:
    """Return the entries of a checkpoint's state that store a tokenizer.

    Args:
        text: Text of the tokenizer, as `Tokenizer.text`; None without a tokenizer.
        settings: Its settings.
    """
    return {TOKENIZER: text, SETTINGS: settings.to_object()}
