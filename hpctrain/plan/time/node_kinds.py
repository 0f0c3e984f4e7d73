"""Several kinds of node in one machine's file: `[[machine.others]]`, each with what it has otherwise.

Ranks fill nodes in order, the first kind's first. A kind has a name and a number of nodes of its own; every
other figure that it does not say is as the first kind's. What was measured over a link of the first kind is
not for another kind that says its own link.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_OWN = ("name", "nodes", "others", "date", "processor", "ranks", "spread")
_MEASURED_OVER = {"inside": "collectives", "between": "crossing"}
_COMMON = ("ranks_per_node", "gradients", "messages", "split_messages", "shared_memory")
"""What the kinds of a machine have in common: how ranks lie, and the habits of the software."""

Path = tuple[str, ...]


def with_others(table: Mapping[str, Any]) -> dict[str, Any]:
    """A `[machine]` table whose other kinds are whole."""
    others = table.get("others")
    if not isinstance(others, list):
        return dict(table)
    first = {key: value for key, value in table.items() if key not in _OWN}
    return {**table, "others": [_over(_without_measured(first, each), each) for each in others]}


def _without_measured(first: Mapping[str, Any], kind: object) -> dict[str, Any]:
    said = kind if isinstance(kind, dict) else {}
    dropped = {measured for link, measured in _MEASURED_OVER.items() if link in said}
    return {key: value for key, value in first.items() if key not in dropped}


def _over(below: object, above: object) -> object:
    """What `above` says, and else `below`; tables by their keys."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _over(below.get(key), value) for key, value in above.items()}


def kind_problems(table: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """What keeps other kinds, as the file has them, from being those of one machine: paths and sentences."""
    others = table.get("others")
    if not isinstance(others, list) or not others:
        return
    if "nodes" not in table:
        yield ("nodes",), "is missing: the number of nodes of the first kind"
    names = {table.get("name")}
    for number, each in enumerate(others):
        path = ("others", str(number))
        if not isinstance(each, dict):
            continue  # no table: said where figures are checked
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
