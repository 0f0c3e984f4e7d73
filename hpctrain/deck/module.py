"""The keys of a module that users bring: which ones it has, what stands in for those of the transformer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

MODULE_KEYS = ("module", "arguments", "miniature", "blocks", "loss", "buffers", "frozen", "vocabulary")
"""The keys of [model] that a deck with a module may have; those up to "buffers" are for no other deck."""

ONLY_OF_MODULES = MODULE_KEYS[:6]

STAND_INS: Mapping[str, Any] = {"family": "gpt2", "layers": 1, "hidden": 2, "heads": 1}
"""Values of keys that are required of a transformer, which nobody reads of a deck with a module."""


def is_file(target: str) -> bool:
    """Whether "FILE.py:FUNCTION" is meant, and not "PACKAGE:FUNCTION"."""
    return target.rpartition(":")[0].endswith(".py")


def found_from(target: str, deck_name: str) -> str:
    """The same target from any folder: a file's is relative to that of the deck which names it."""
    if not is_file(target):
        return target
    return os.path.abspath(os.path.join(os.path.dirname(deck_name), target))  # noqa: PTH100, PTH118, PTH120


def fill_module(model: dict[str, Any], deck_name: str) -> None:
    """What a deck with a module has in its table `model`, in place."""
    for name in ("module", "loss"):
        if isinstance(model.get(name), str):
            model[name] = found_from(model[name], deck_name)
    for name, value in STAND_INS.items():
        model.setdefault(name, value)


def shown(section: str, name: str, has_module: bool) -> bool:
    """Whether a resolved deck shows a key."""
    return section != "model" or not has_module or name in MODULE_KEYS


def model_keys(model: Mapping[str, Any]) -> dict[str, Any]:
    """Those of [model] that mean something, by their values."""
    return {name: value for name, value in model.items() if shown("model", name, model["module"] is not None)}
