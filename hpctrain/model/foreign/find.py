"""From what a deck names to the module that it builds."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import isclass
from pathlib import Path
from typing import Any

from torch import nn

from hpctrain.deck.code import NamedCode, remote_code
from hpctrain.deck.user_code import call_function, import_function, run_user_code
from hpctrain.errors import HpctrainError
from hpctrain.files import parse_json, read_text
from hpctrain.model.foreign.config import unknown_names
from hpctrain.text import article

_CONFIG_BYTES = 1 << 24


def build_module(code: NamedCode, arguments: Mapping[str, Any]) -> nn.Module:
    """Build the module that a deck names, on the default device.

    A class of Hugging Face's is made of its config: of the one in the folder `config`, or of the arguments.
    HpctrainError where they do not fit, it fails, or what it gives is no module.
    """
    function: Any = import_function(code)
    given = dict(arguments)
    short = code.title
    config = getattr(function, "config_class", None) if isclass(function) else None
    if config is None:
        built = call_function(function, given, short, "model.arguments")
    else:
        folder = given.pop("config", None)
        if hasattr(config, "to_dict"):
            unknown = [*unknown_names(function, config, given, folder)] if given else []
            if unknown:
                raise HpctrainError(
                    [f"{short}: [model.arguments] does not fit: {sentence}" for sentence in unknown]
                )
        if folder is not None:
            _refuse_remote_code(folder, given)
        with run_user_code(f"{short} fails"):
            built = function(config(**given) if folder is None else config.from_pretrained(folder, **given))
    if not isinstance(built, nn.Module):
        raise HpctrainError(f"{short}: expected a torch.nn.Module, got {article(type(built).__name__)}")
    return built


def _refuse_remote_code(folder: str, arguments: Mapping[str, Any]) -> None:
    """Raise HpctrainError if a folder's config has code loaded from elsewhere that no argument replaces."""
    path = Path(folder) / "config.json"
    try:
        content = parse_json(read_text(path, _CONFIG_BYTES))
    except (OSError, ValueError):
        return  # transformers refuses it in its own words, or knows the name of a model on a hub
    for name in remote_code("config", content):
        argument = name.key.partition(".")[2]
        if argument not in arguments:
            raise HpctrainError(
                f"{path}: {argument} = {name.target}: refers to remote code (set {argument} "
                "in [model.arguments])"
            )
