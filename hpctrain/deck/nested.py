"""Values of a deck in tables that hold tables, by the full names of keys ("optimizer.muon.momentum")."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Tables = dict[str, dict[str, Any]]
"""Sections of a deck by name, as TOML has them."""


def look_up(tables: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value of a key, or the default if the key or a table that it is in is missing."""
    found: Any = tables
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return default
        found = found[part]
    return found


def table_in(tables: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a table by its full name, after creating it, and those that it is in, where it is missing."""
    table = tables
    for part in name.split("."):
        inner = table.get(part)
        table[part] = table = inner if isinstance(inner, dict) else {}
    return table


def remove(tables: Mapping[str, Any], key: str) -> None:
    """Remove a key if it is there."""
    path, _, name = key.rpartition(".")
    table = look_up(tables, path)
    if isinstance(table, dict):
        table.pop(name, None)


def leaf_names(tables: Mapping[str, Any], known: Mapping[str, object], path: str = "") -> Iterator[str]:
    """Yield the full names of all keys of tables in order. Only tables whose name is `known` are entered."""
    for name, value in tables.items():
        full = f"{path}.{name}".lstrip(".")
        if full in known and isinstance(value, dict):
            yield from leaf_names(value, known, full)
        else:
            yield full
