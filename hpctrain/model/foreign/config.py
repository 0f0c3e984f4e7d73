"""Which names a config of transformers knows: it takes any other as well, and nobody reads it then."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from inspect import getmodule, getsource, signature
from pathlib import Path
from typing import Any

from hpctrain.text import nearest

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
