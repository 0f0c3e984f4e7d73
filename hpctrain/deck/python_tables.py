"""Conversion of a deck that a Python program passes as dictionaries to TOML text."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpctrain.deck.sources import toml_key, toml_value
from hpctrain.errors import HpctrainError
from hpctrain.text import kind_of


def toml_compatible(name: str, value: object) -> Any:
    """Return a value with the types of TOML: paths become text, tuples lists, and NumPy scalars numbers.

    Args:
        name: Name of the value, with which messages begin.
        value: The value; None stands for a key that the deck does not have, and is returned as it is.

    Raises:
        HpctrainError: TOML has no such type.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _compatible_item(f"{name}.{key}", each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_compatible_item(name, each) for each in value]
    if isinstance(value, np.generic):
        return toml_compatible(name, value.item())
    raise HpctrainError(
        f"{name}: {kind_of(value)} cannot be a value of a deck (use text, numbers, booleans, lists of these, "
        "or dicts with names)"
    )


def _compatible_item(name: str, value: object) -> Any:
    if value is None:
        raise HpctrainError(f"{name}: None cannot be a value of a deck (leave it out)")
    return toml_compatible(name, value)


def tables_to_toml(tables: Mapping[str, object]) -> str:
    """Return a deck as TOML text.

    Args:
        tables: Sections with their keys, {"run": {"steps": 10}}, or full names of keys, {"run.steps": 10}, or
            both. A key whose value is None is left out.

    Raises:
        HpctrainError: A name or value cannot be in a deck.
    """
    if not all(isinstance(name, str) for name in tables):
        raise HpctrainError(
            'the deck: must have names of sections or keys that are text, such as {"run": {"steps": 10}}'
        )
    return "\n".join([*_top_level_lines(tables), *_section_lines(tables)]) + "\n"


def _top_level_lines(tables: Mapping[str, object]) -> Iterator[str]:
    """Yield the lines that precede all sections: `include`, and sections that are a word."""
    for name, value in tables.items():
        if "." not in name and value is not None and not _is_section(value):
            yield f"{toml_key(name)} = {toml_value(toml_compatible(name, value))}"


def _section_lines(tables: Mapping[str, object]) -> Iterator[str]:
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
                yield from ("", f"[[{toml_key(name)}]]", *_key_lines(toml_compatible(name, row)))
    for name, keys in sections.items():
        yield from ("", f"[{toml_key(name)}]", *_key_lines(keys))


def _key_lines(keys: Mapping[str, object]) -> Iterator[str]:
    for key, value in keys.items():
        if value is not None:
            yield f"{toml_key(key)} = {toml_value(value)}"


def _is_section(value: object) -> bool:
    """Return True for a table, or for a list of tables."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(row, Mapping) for row in value)
