"""Several kinds of node in the file of a machine: a table `[[machine.others]]` for each further kind.

Ranks fill nodes in order, those of the first kind first. A kind has its own name and number of nodes. Other
rates that it does not set are those of the first kind. If a kind sets a link, operations that were measured
on that link of the first kind do not apply to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_OWN_KEYS = ("name", "nodes", "others", "date", "processor", "ranks", "spread")
_MEASURED_OVER = {"inside": "collectives", "between": "crossing"}
_COMMON = ("ranks_per_node", "gradients", "messages", "split_messages", "shared_memory")
"""Keys that all kinds of a machine have in common."""

Path = tuple[str, ...]


def complete_kinds(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `[machine]` table in which every other kind of node has all rates."""
    others = table.get("others")
    if not isinstance(others, list):
        return dict(table)
    first = {key: value for key, value in table.items() if key not in _OWN_KEYS}
    return {**table, "others": [_merge(_without_measured(first, each), each) for each in others]}


def _without_measured(first: Mapping[str, Any], kind: object) -> dict[str, Any]:
    kind_table = kind if isinstance(kind, dict) else {}
    dropped = {measured for link, measured in _MEASURED_OVER.items() if link in kind_table}
    return {key: value for key, value in first.items() if key not in dropped}


def _merge(below: object, above: object) -> object:
    """Return the values of `above`, and those of `below` for missing keys. Tables are merged."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _merge(below.get(key), value) for key, value in above.items()}


def kind_problems(table: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield the paths and the problems of other kinds of node, as the file has them."""
    others = table.get("others")
    if not isinstance(others, list) or not others:
        return
    if "nodes" not in table:
        yield ("nodes",), "is missing: the number of nodes of the first kind"
    names = {table.get("name")}
    for number, each in enumerate(others):
        path = ("others", str(number))
        if not isinstance(each, dict):
            continue  # the validation of the rates reports it
        if "nodes" not in each:
            yield (*path, "nodes"), "is missing: the number of nodes of this kind"
        if "name" in each and each["name"] in names:
            yield (*path, "name"), f'"{each["name"]}" is already the name of another kind'
        names.add(each.get("name"))
        if "others" in each:
            yield (*path, "others"), "is unsupported within a kind of node"
        for key in _COMMON:
            if key in each and each[key] != table.get(key, each[key]):
                yield (*path, key), f"must be that of the first kind, {str(table[key]).lower()}"
            elif key in each and key not in table:
                yield (*path, key), f"applies to all kinds (use machine.{key})"
