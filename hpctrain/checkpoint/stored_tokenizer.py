"""The tokenizer in the state of a checkpoint, and the settings of tokenizer and model beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.data.tokenizer import Tokenizer
from hpctrain.data.tokenizer_settings import SETTINGS, TokenizerSettings

TOKENIZER = "tokenizer"
"""Key of the tokenizer's text in the state of a checkpoint."""


def stored_settings(state: Mapping[str, Any]) -> TokenizerSettings:
    """Return the settings in a checkpoint's state; those of an older one are empty."""
    return TokenizerSettings.from_object(state.get(SETTINGS))


def tokenizer_of_state(state: Mapping[str, Any], path: Path) -> Tokenizer | None:
    """Return the tokenizer in a checkpoint's state; None without one.

    Raises:
        HpctrainError: it is no tokenizer that can be used.
    """
    text = state.get(TOKENIZER)
    if not isinstance(text, str):
        return None
    return Tokenizer(text, f"{path}: tokenizer", stored_settings(state))


def tokenizer_state(text: str | None, settings: TokenizerSettings) -> dict[str, Any]:
    """Return what the state of a checkpoint says of its tokenizer."""
    return {TOKENIZER: text, SETTINGS: settings.to_object()}
