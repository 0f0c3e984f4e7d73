"""What a script gives as keys of a deck, as TOML has it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpctrain.deck.sources import toml_key, toml_value
from hpctrain.errors import HpctrainError
from hpctrain.words import kind_of


def toml_compatible(name: str, value: object) -> Any:
    """A value as TOML has it; None where the key is to be as if nobody had written it. HpctrainError, which
    begins with the name, for what no deck can say.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _within(f"{name}.{key}", each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_within(name, each) for each in value]
    if isinstance(value, np.generic):
        return toml_compatible(name, value.item())
    raise HpctrainError(
        f"{name}: {kind_of(value)} is nothing that a deck can say (texts, numbers, true and false, lists, "
        "and dicts of these by name are)"
    )


def _within(name: str, value: object) -> Any:
    if value is None:
        raise HpctrainError(f"{name}: None is nothing that a deck can say (leave it out)")
    return toml_compatible(name, value)


def tables_to_toml(tables: Mapping[str, object]) -> str:
    """The TOML of a deck that is given as sections of keys, {"run": {"steps": 10}}, or as {"run.steps": 10},
    or both. HpctrainError for what no deck can say. A key that is None is left out.
    """
    if not all(isinstance(name, str) for name in tables):
        raise HpctrainError(
            'the deck: is to have sections or keys by name, as {"run": {"steps": 10}}, where names are texts'
        )
    return "\n".join([*_single(tables), *_sections(tables)]) + "\n"


def _single(tables: Mapping[str, object]) -> Iterator[str]:
    """What is no section, first: `include`, and sections that are a word."""
    for name, value in tables.items():
        if "." not in name and value is not None and not _is_section(value):
            yield f"{toml_key(name)} = {toml_value(toml_compatible(name, value))}"


def _sections(tables: Mapping[str, object]) -> Iterator[str]:
    sections: dict[str, dict[str, object]] = {}
    for name, value in tables.items():
        section, dot, key = name.partition(".")
        if dot:
            sections.setdefault(section, {})[key] = toml_compatible(name, value)
        elif isinstance(value, Mapping):
            keys = {key: toml_compatible(f"{name}.{key}", each) for key, each in value.items()}
            sections.setdefault(name, {}).update(keys)
        elif _is_section(value):
            assert isinstance(value, Sequence)
            for row in value:
                yield from ("", f"[[{toml_key(name)}]]", *_lines(toml_compatible(name, row)))
    for name, keys in sections.items():
        yield from ("", f"[{toml_key(name)}]", *_lines(keys))


def _lines(keys: Mapping[str, object]) -> Iterator[str]:
    for key, value in keys.items():
        if value is not None:
            yield f"{toml_key(key)} = {toml_value(value)}"


def _is_section(value: object) -> bool:
    """Whether it is keys by name, or a list of such."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(row, Mapping) for row in value)
