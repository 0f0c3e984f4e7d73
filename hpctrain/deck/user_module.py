"""The keys of a module that users bring: which ones it has, what stands in for those of the transformer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hpctrain.deck.code import resolve_target
from hpctrain.deck.key import expand_home

_OWN = ("module", "arguments", "miniature", "blocks", "loss", "initial", "buffers", "plan")
MODULE_KEYS = (*_OWN, "frozen", "vocabulary", "from")
"""The keys of [model] that a deck with a module may have; those up to "plan" are for no other deck."""

ONLY_OF_MODULES = _OWN

TARGETS = "module", "loss", "initial"
"""Those of them that name a function."""

STAND_INS: Mapping[str, Any] = {"family": "gpt2", "layers": 1, "hidden": 2, "heads": 1}
"""Values of keys that are required of a transformer, which nobody reads of a deck with a module."""


def fill_module(model: dict[str, Any], deck_name: str) -> None:
    """What a deck with a module has in its table `model`, in place."""
    for name in TARGETS:
        if isinstance(model.get(name), str):
            model[name] = resolve_target(model[name], deck_name)
    for name, value in STAND_INS.items():
        model.setdefault(name, value)


def config_arguments(model: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a class of `transformers` that `model.from` settles, for a deck without any.

    They name the folder, whose `config.json` describes the model; None if there is no such folder or class.
    """
    target, source = model.get("module"), model.get("from")
    if model.get("arguments") is not None or not isinstance(target, str) or not isinstance(source, str):
        return None
    if target.partition(":")[0].partition(".")[0] != "transformers":
        return None
    folder = os.path.abspath(expand_home(source))  # noqa: PTH100
    return {"config": folder} if os.path.isfile(os.path.join(folder, "config.json")) else None  # noqa: PTH113, PTH118


def shown(
    key: str,
    has_module: bool,
    has_dataset: bool = False,
    has_mixture: bool = False,
    has_policy: bool = True,
) -> bool:
    """Whether a resolved deck shows a key."""
    if (has_mixture and key == "data.tokens") or (key.startswith("policy.") and not has_policy):
        return False
    section, _, name = key.partition(".")
    if has_dataset and key in {"data.tokens", "data.other_tokenizer", "batch.sequence", "model.vocabulary"}:
        return False
    return section != "model" or not has_module or name in MODULE_KEYS


def model_keys(model: Mapping[str, Any]) -> dict[str, Any]:
    """Those of [model] that mean something, by their values."""
    has_module = model["module"] is not None
    return {name: value for name, value in model.items() if shown(f"model.{name}", has_module)}
