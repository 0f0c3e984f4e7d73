"""From what a deck names to the module that it builds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from inspect import getmodule, getsource, isclass, signature
from pathlib import Path
from typing import Any

from torch import nn

from hpctrain.deck.code import NamedCode, remote_code
from hpctrain.deck.user_code import call_function, import_function, run_user_code
from hpctrain.errors import HpctrainError
from hpctrain.files import parse_json, read_text
from hpctrain.text import article, nearest

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


_READ = (
    r"(?:config\.|(?:getattr|hasattr)\([\w.]*config, ?[\"']|kwargs\.(?:pop|get|setdefault)\(\s*[\"']){name}\b"
    r"|[\"']{name}[\"'] (?:not )?in kwargs"
)
"""How code reads an attribute that no config has by itself, or an argument that stands for another."""


def unknown_names(
    model: type, config: type, given: Mapping[str, Any], folder: str | None = None
) -> Iterator[str]:
    """In words, each of the names `given` for a model's config that neither knows, nor that of the `folder`;
    of configs within it, too.
    """
    known = set(_known(config, folder))
    code = [_source(base) for kind in (model, config) for base in kind.__mro__]
    for name, value in given.items():
        within = getattr(config, "sub_configs", {}).get(name)
        if isinstance(value, Mapping) and isinstance(within, type) and hasattr(within, "to_dict"):
            yield from (f"{name}: {each}" for each in unknown_names(model, within, value))
        elif name not in known and not any(
            re.search(_READ.format(name=re.escape(name)), text) for text in set(code)
        ):
            near = nearest(name, sorted(each for each in known if not each.startswith("_")))
            yield f"{config.__name__} has no {name}" + (f" (did you mean {near}?)" if near else "")


def _known(config: type, folder: str | None) -> Iterator[str]:
    """Names of attributes that a config has, is given by name, or calls otherwise."""
    yield from getattr(config, "attribute_map", {})
    for base in config.__mro__:
        yield from (name for name, each in vars(base).items() if not callable(each))
        if "__init__" in vars(base):
            with suppress(ValueError):
                yield from signature(base).parameters
    with suppress(Exception):  # of which some are made of more than nothing
        made: Any = config() if folder is None else getattr(config, "from_pretrained")(folder)  # noqa: B009
        yield from made.to_dict()
        yield from vars(made)


def _source(kind: type) -> str:
    """The code that a class is written in."""
    home = getmodule(kind)
    if home is None or kind is object or not Path(getattr(home, "__file__", None) or "").suffix:
        return ""
    with suppress(OSError):
        return getsource(home)
    return ""
