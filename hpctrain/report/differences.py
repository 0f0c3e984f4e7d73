"""Differences of two checkpoint files, as an object for JSON and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from math import inf
from textwrap import shorten
from typing import Any

from hpctrain.checkpoint.checkpoint_index import CheckpointIndex
from hpctrain.checkpoint.stored_deck import DEFAULTS_FOLLOW, stored_deck
from hpctrain.checkpoint.tensor_differences import comparable, compare
from hpctrain.comm.group import Group
from hpctrain.deck.sources import toml_value
from hpctrain.deck.toml import TomlError, parse_toml
from hpctrain.errors import HpctrainError
from hpctrain.files import finite
from hpctrain.report.contents import shape_text
from hpctrain.text import table

TENSORS_SHOWN = 10
_TEXT = 32
_BEFORE = 8
"""Characters of two long values that are shown before their first difference."""
_IGNORED_STATE = ("deck", DEFAULTS_FOLLOW, "tokenizer", "history", "losses", "versions")
"""Keys of a state that are shown in another form or differ in any two runs."""

Differences = dict[str, Any]


def differences(one: CheckpointIndex, other: CheckpointIndex, group: Group) -> Differences:
    """Return all differences of two files. Collective; ranks read pieces of a few megabytes.

    "equal" is True if all tensors have the same names, types, shapes and bits.

    Raises:
        HpctrainError: As in `compare`.
    """
    names = set(comparable(one, other))
    compared = compare(one, other, group)
    both = [name for name in one.datasets if name in other.datasets and name not in names]
    facts: Differences = {
        "files": [str(one.path), str(other.path)],
        "only_in": [
            [name for name in here.datasets if name not in there.datasets]
            for here, there in ((one, other), (other, one))
        ],
        "reshaped": [
            {
                "name": name,
                "shapes": [list(each.datasets[name].shape) for each in (one, other)],
                "types": [each.datasets[name].kind for each in (one, other)],
            }
            for name in both
        ],
        "tensors": [
            {"name": each.dataset, "elements": each.elements, "differing": each.differing}
            | {"absolute": finite(each.absolute), "relative": finite(each.relative)}
            for each in compared
        ],
        "deck": changes(*(_keys(each) for each in (one, other))),
        "state": changes(*(_state(each.state) for each in (one, other))),
    }
    differing = any(each.differing for each in compared)
    return facts | {"equal": not (differing or both or any(facts["only_in"]))}


def differences_text(facts: Differences, everything: bool = False) -> list[str]:
    """Return the differences as lines, with all tensors if `everything`, else those that differ most."""
    first, second = facts["files"]
    differing = [tensor for tensor in facts["tensors"] if tensor["differing"]]
    lines = [f"first   {first}", f"second  {second}", ""]
    lines.append(_summary(facts, len(differing)))
    for name, only in zip(("first", "second"), facts["only_in"], strict=True):
        shown = only if everything else only[:TENSORS_SHOWN]
        lines += [f"only in the {name}: {each}" for each in shown]
        lines += _more(len(only) - len(shown))
    if facts["reshaped"]:
        rows: list[tuple[str, ...]] = [("of another shape or type", "first", "second")]
        for each in facts["reshaped"]:
            sides = zip(each["types"], each["shapes"], strict=True)
            rows.append((each["name"], *(f"{kind} {shape_text(shape)}" for kind, shape in sides)))
        shown_rows = rows if everything else rows[: 1 + TENSORS_SHOWN]
        lines += ["", *table(shown_rows, left=(0, 1, 2)), *_more(len(rows) - len(shown_rows))]
    listed = facts["tensors"] if everything else differing
    if differing and not everything:
        lines += ["", *table(_folder_rows(facts["tensors"]))]
    if listed:
        ranked = sorted(listed, key=lambda tensor: -_size(tensor))
        shown = ranked if everything else ranked[:TENSORS_SHOWN]
        rows = [("tensor", "differing", "of", "largest difference", "relative")]
        for tensor in shown:
            counts = str(tensor["differing"]), str(tensor["elements"])
            largest = _figure(tensor, "absolute"), _figure(tensor, "relative")
            rows.append((tensor["name"], *counts, *largest))
        lines += ["", *table(rows), *_more(len(ranked) - len(shown))]
    for section, title in (("deck", "deck key"), ("state", "state")):
        if facts[section]:
            rows = [(title, "first", "second")]
            rows += [(key, *value_texts(*values)) for key, values in facts[section].items()]
            lines += ["", *table(rows, left=(0, 1, 2))]
    return lines


def _summary(facts: Differences, differing: int) -> str:
    count = len(facts["tensors"])
    if facts["equal"]:
        return f"All {count} tensors are equal, bit for bit."
    parts = [f"{differing} of the {count} tensors of one name, shape and type differ"]
    lone = sum(map(len, facts["only_in"]))
    if lone:
        parts.append(f"{lone} {'is' if lone == 1 else 'are'} in one file only")
    if facts["reshaped"]:
        parts.append(f"{len(facts['reshaped'])} of another shape or type")
    return "; ".join(parts) + "."


def _folder_rows(tensors: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return rows with the number of different tensors and the largest difference in each folder."""
    folders: dict[str, list[Mapping[str, Any]]] = {}
    for tensor in tensors:
        folders.setdefault(tensor["name"].rpartition("/")[0] or "/", []).append(tensor)
    rows: list[tuple[str, ...]] = [("folder", "differing", "of", "relative difference at most")]
    for folder, own in folders.items():
        differing = sum(tensor["differing"] > 0 for tensor in own)
        most = max(own, key=_size)
        rows.append((folder, str(differing), str(len(own)), _figure(most, "relative") or "equal"))
    return rows


def _figure(tensor: Mapping[str, Any], name: str) -> str:
    if not tensor["differing"]:
        return "equal" if name == "absolute" else ""
    return "not finite" if tensor[name] is None else f"{tensor[name]:.3g}"


def _size(tensor: Mapping[str, Any]) -> float:
    """Return how much a tensor differs. Different signs of zeros count more than equal tensors."""
    if not tensor["differing"]:
        return -1.0
    return inf if tensor["relative"] is None else float(tensor["relative"])


def _more(count: int) -> list[str]:
    return [f"and {count} more (see --tensors)"] if count > 0 else []


def _keys(structure: CheckpointIndex) -> dict[str, object]:
    """Return the values of a stored deck by "section.key".

    If the deck is not valid, these are the values that its TOML gives, or its text under "deck" if it is not
    TOML.
    """
    text = structure.state.get("deck")
    if not isinstance(text, str):
        return {}
    tables: dict[str, Any]
    try:
        tables = stored_deck(structure.state, structure.path).model_dump(by_alias=True, exclude_none=True)
    except HpctrainError:
        try:
            tables, _ = parse_toml(text)
        except TomlError:
            return {"deck": text}
    return _flat(tables)


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Return all values of nested dictionaries by their full names, such as "optimizer.muon.momentum"."""
    values: dict[str, object] = {}
    for name, value in tables.items():
        if isinstance(value, dict) and value:
            values |= _flat(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


def _state(state: Mapping[str, Any]) -> dict[str, object]:
    """Return the values of a state without its deck, long texts, and values that differ in any two runs."""
    facts = {name: value for name, value in state.items() if name not in _IGNORED_STATE}
    facts |= {"versions": state.get("versions", {})}
    return _flat(facts | {"tokenizer": state["tokenizer"]} if "tokenizer" in state else facts)


def changes(one: Mapping[str, object], other: Mapping[str, object]) -> dict[str, list[object]]:
    """Return the keys with different values in two mappings, with both values; None for a missing one."""
    return {
        key: [one.get(key), other.get(key)]
        for key in dict.fromkeys((*one, *other))
        if one.get(key) != other.get(key)
    }


def value_texts(one: object, other: object) -> tuple[str, str]:
    """Return two different values of a deck or state in a few letters each; "-" for a value that is missing.

    Long values whose beginnings are equal are shown from shortly before their first difference.
    """
    texts = ["-" if value is None else toml_value(value) for value in (one, other)]
    short = [shorten(text, _TEXT, placeholder="...") or "..." for text in texts]
    if short[0] == short[1]:
        equal = (one_letter == other_letter for one_letter, other_letter in zip(*texts, strict=False))
        common = sum(takewhile(bool, equal))
        ends = [f"...{text[max(0, common - _BEFORE) :]}" for text in texts]
        short = [text if len(text) <= _TEXT else f"{text[: _TEXT - 3]}..." for text in ends]
    return short[0], short[1]
