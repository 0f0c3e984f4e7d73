"""Building of the module that a deck names: its function or class is imported and called."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from inspect import getmodule, getsource, isclass, signature
from pathlib import Path
from typing import Any

from torch import nn

from hpctrain.deck.code import CAUSAL_MODEL, NamedCode, remote_code
from hpctrain.deck.user_code import call_function, import_function, run_user_code
from hpctrain.errors import HpctrainError
from hpctrain.files import parse_json, read_text
from hpctrain.model.modules.causal_model import build_causal_model
from hpctrain.text import article, nearest

_CONFIG_BYTES = 1 << 24
"""Largest size of a config.json."""


def build_module(code: NamedCode, arguments: Mapping[str, Any]) -> nn.Module:
    """Build the module that a deck names, on torch's default device.

    A class of Hugging Face `transformers` is built from its config: the one in the folder of the argument
    `config`, or one made of the arguments. CAUSAL_MODEL is built from the text of its configuration.

    Args:
        code: The function or class, as `model.module` names it.
        arguments: Its arguments, from `[model.arguments]`.

    Raises:
        HpctrainError: An argument is unknown to the config, the user's code fails, or it returns no module.
    """
    if code.target == CAUSAL_MODEL:
        return build_causal_model(arguments)
    function: Any = import_function(code)
    arguments = dict(arguments)
    short = code.title
    config = getattr(function, "config_class", None) if isclass(function) else None
    if config is None:
        built = call_function(function, arguments, short, "model.arguments")
    else:
        folder = arguments.pop("config", None)
        if hasattr(config, "to_dict"):
            unknown = [*unknown_argument_problems(function, config, arguments, folder)] if arguments else []
            if unknown:
                raise HpctrainError(
                    [f"{short}: [model.arguments] does not fit: {sentence}" for sentence in unknown]
                )
        if folder is not None:
            _refuse_remote_code(folder, arguments)
        with run_user_code(f"{short} fails"):
            built = function(
                config(**arguments) if folder is None else config.from_pretrained(folder, **arguments)
            )
    if not isinstance(built, nn.Module):
        raise HpctrainError(f"{short}: expected a torch.nn.Module, got {article(type(built).__name__)}")
    return built


def _refuse_remote_code(folder: str, arguments: Mapping[str, Any]) -> None:
    """Raise HpctrainError if a folder's config refers to remote code and no argument replaces it."""
    path = Path(folder) / "config.json"
    try:
        content = parse_json(read_text(path, _CONFIG_BYTES))
    except (OSError, ValueError):
        return  # transformers reports the error, or `folder` is the name of a model on a hub
    for name in remote_code("config", content):
        argument = name.key.partition(".")[2]
        if argument not in arguments:
            raise HpctrainError(
                f"{path}: {argument} = {name.target}: refers to remote code (set {argument} "
                "in [model.arguments])"
            )


_ATTRIBUTE_ACCESS = (
    r"(?:config\.|(?:getattr|hasattr)\([\w.]*config, ?[\"']|kwargs\.(?:pop|get|setdefault)\(\s*[\"']){name}\b"
    r"|[\"']{name}[\"'] (?:not )?in kwargs"
)
"""Regular expression for code that reads an attribute or keyword argument of a config."""


def unknown_argument_problems(
    model: type, config: type, arguments: Mapping[str, Any], folder: str | None = None
) -> Iterator[str]:
    """Yield a sentence for each argument that neither a model's code nor its config reads.

    A config of `transformers` accepts any name and ignores those that it does not know. Arguments for
    configs inside the config are checked as well.

    Args:
        model: Class of the model.
        config: Class of its config.
        arguments: Values of the config by name.
        folder: Folder whose `config.json` has further names; None if there is none.
    """
    known = set(_known_config_names(config, folder))
    code = [_defining_source(base) for kind in (model, config) for base in kind.__mro__]
    for name, value in arguments.items():
        sub_config = getattr(config, "sub_configs", {}).get(name)
        if isinstance(value, Mapping) and isinstance(sub_config, type) and hasattr(sub_config, "to_dict"):
            yield from (f"{name}: {each}" for each in unknown_argument_problems(model, sub_config, value))
        elif name not in known and not any(
            re.search(_ATTRIBUTE_ACCESS.format(name=re.escape(name)), text) for text in set(code)
        ):
            near = nearest(name, sorted(each for each in known if not each.startswith("_")))
            yield f"{config.__name__} has no {name}" + (f" (did you mean {near}?)" if near else "")


def _known_config_names(config: type, folder: str | None) -> Iterator[str]:
    """Yield the names that a config has as attributes, takes as arguments, or maps to other names."""
    yield from getattr(config, "attribute_map", {})
    for base in config.__mro__:
        yield from (name for name, each in vars(base).items() if not callable(each))
        if "__init__" in vars(base):
            with suppress(ValueError):
                yield from signature(base).parameters
    with suppress(Exception):  # some configs cannot be made without arguments
        example: Any = config() if folder is None else getattr(config, "from_pretrained")(folder)  # noqa: B009
        yield from example.to_dict()
        yield from vars(example)


def _defining_source(kind: type) -> str:
    """Return the source of the module that defines a class, or "" if there is none."""
    defining_module = getmodule(kind)
    if (
        defining_module is None
        or kind is object
        or not Path(getattr(defining_module, "__file__", None) or "").suffix
    ):
        return ""
    with suppress(OSError):
        return getsource(defining_module)
    return ""
