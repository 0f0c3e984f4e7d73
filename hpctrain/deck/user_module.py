"""Keys of decks whose model is a module of the user's own (`model.module`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hpctrain.deck.code import resolve_target
from hpctrain.deck.key import expand_user_path

_OWN = ("module", "arguments", "miniature", "blocks", "loss", "initial", "buffers", "plan")
MODULE_KEYS = (*_OWN, "frozen", "vocabulary", "from")
"""Keys of [model] that a deck with a module may have."""

ONLY_OF_MODULES = _OWN
"""Keys of `MODULE_KEYS` that only a deck with a module may have."""

TARGETS = "module", "loss", "initial"
"""Keys of `MODULE_KEYS` that name a function or class."""

STAND_INS: Mapping[str, Any] = {"family": "gpt2", "layers": 1, "hidden": 2, "heads": 1}
"""Values of keys that a transformer requires and that are not read for a deck with a module."""


def fill_module(model: dict[str, Any], deck_name: str) -> None:
    """Complete the table `model` of a deck with a module in place."""
    for name in TARGETS:
        if isinstance(model.get(name), str):
            model[name] = resolve_target(model[name], deck_name)
    for name, value in STAND_INS.items():
        model.setdefault(name, value)


def config_arguments(model: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a class of `transformers` whose configuration `model.from` contains.

    Args:
        model: Table `model` of a deck.

    Returns:
        The folder that contains `config.json`, as the argument `config`. None if the deck gives arguments, if
        its module is not a class of `transformers`, or if there is no such file.
    """
    target, source = model.get("module"), model.get("from")
    if model.get("arguments") is not None or not isinstance(target, str) or not isinstance(source, str):
        return None
    if target.partition(":")[0].partition(".")[0] != "transformers":
        return None
    folder = os.path.abspath(expand_user_path(source))  # noqa: PTH100
    return {"config": folder} if os.path.isfile(os.path.join(folder, "config.json")) else None  # noqa: PTH113, PTH118


def is_in_resolved_deck(
    key: str,
    has_module: bool,
    has_dataset: bool = False,
    has_mixture: bool = False,
    has_policy: bool = True,
) -> bool:
    """Return True if a resolved deck shows a key.

    Args:
        key: Full name of the key.
        has_module: True if the deck has `model.module`.
        has_dataset: True if it has `data.dataset`.
        has_mixture: True if it has `data.mixture`.
        has_policy: True if its objective trains a policy.
    """
    if (has_mixture and key == "data.tokens") or (key.startswith("policy.") and not has_policy):
        return False
    section, _, name = key.partition(".")
    if has_dataset and key in {"data.tokens", "data.other_tokenizer", "batch.sequence", "model.vocabulary"}:
        return False
    return section != "model" or not has_module or name in MODULE_KEYS


def model_keys(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of [model] that have an effect, with their values."""
    has_module = model["module"] is not None
    return {name: value for name, value in model.items() if is_in_resolved_deck(f"model.{name}", has_module)}
