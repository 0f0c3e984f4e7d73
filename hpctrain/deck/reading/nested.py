"""Values of a deck in tables that hold tables, by the full names of keys ("optimizer.muon.momentum")."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpctrain.deck.schema import tables

Tables = dict[str, dict[str, Any]]
"""Sections of a deck by name, as TOML has them."""


def look_up(values: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value of a key or table by its full name; the default if it, or its table, is missing.

    The value is not copied.
    """
    found: Any = values
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return default
        found = found[part]
    return found


def table_in(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the table of a full name itself, not a copy.

    The table and those that it is in are added to `values` where they are missing. A value on this path that
    is not a table is replaced by an empty table: for "a.b", the value of "a", too.
    """
    table = values
    for part in name.split("."):
        inner = table.get(part)
        table[part] = table = inner if isinstance(inner, dict) else {}
    return table


def remove(values: Mapping[str, Any], key: str) -> None:
    """Remove a key, or a table in a section, by its full name, in place. Do nothing if it is missing.

    The name of a section, such as "optimizer", removes nothing.
    """
    path, _, name = key.rpartition(".")
    table = look_up(values, path)
    if isinstance(table, dict):
        table.pop(name, None)


def leaf_names(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the full names of all keys of a table in order; those of the schema's tables in it one by one.

    Args:
        values: The table.
        path: Its full name; "" for the whole deck.
    """
    for name, value in values.items():
        full = f"{path}.{name}".lstrip(".")
        if full in tables() and isinstance(value, dict):
            yield from leaf_names(value, full)
        else:
            yield full


def choices_in(values: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], str, Mapping[str, str]]]:
    """Yield each key that selects a table, for all tables of the schema that a deck has.

    Each item has the full name of the table with the key, this table itself (changes of it change `values`),
    the name of the key, and the tables that it selects, as `Section.choices` has them.
    """
    for path, kind in tables().items():
        if isinstance(table := look_up(values, path), dict):
            for choice, names in kind.choices().items():
                yield path, table, choice, names
