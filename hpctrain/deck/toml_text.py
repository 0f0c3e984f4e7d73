"""TOML text of resolved decks, and of decks that a Python program passes as dictionaries."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from pydantic.fields import FieldInfo

from hpctrain.deck.check import data_ranks
from hpctrain.deck.key import field_text, selecting_key, table_class
from hpctrain.deck.presets import preset_named
from hpctrain.deck.reading.defaults import is_default
from hpctrain.deck.reading.nested import Tables, leaf_names, look_up, remove
from hpctrain.deck.reading.old_keys import NONE
from hpctrain.deck.schema import Deck, fields, tables
from hpctrain.deck.sections.module import is_in_resolved_deck
from hpctrain.deck.sections.objective import POLICY_KINDS
from hpctrain.deck.sources import toml_key, toml_value
from hpctrain.errors import HpctrainError
from hpctrain.text import kind_of


def deck_text(deck: Deck, ranks: int | None = None) -> str:
    """Return the resolved deck as TOML, which `parse_deck` with includes=False reads as an equal deck. Local.

    For the deck of a resumed run, pass the same `completed`. Keys without a value are comments that tell what
    replaces it. Keys whose defaults depend on other keys are comments as well, so that they follow other
    values of those keys when the text is parsed. Keys that the deck does not use, such as those of a
    transformer in a deck with `model.module`, are left out. Paths of code are absolute; other
    relative paths stay relative. Runtime choices, places of keys and the trust in code are not in the text.

    Args:
        deck: The deck.
        ranks: Number of ranks, for the comment about layout.data; None to omit it.

    Raises:
        HpctrainError: `ranks` is given, and the deck has problems on this number of ranks.
    """
    values: Tables = deck.model_dump(by_alias=True, exclude_none=True)
    has = (
        deck.model.module is not None,
        deck.data.dataset is not None,
        deck.data.mixture is not None,
        deck.objective.kind in POLICY_KINDS,
    )
    for key in [key for key in leaf_names(values) if not is_in_resolved_deck(key, *has)]:
        remove(values, key)
    # The steps of run.tokens depend on the work that a run has done, too.
    following = {
        key
        for key in deck.sources.defaulted
        if look_up(values, key) is not None and (key == "run.steps" or is_default(values, key))
    }

    def line(key: str, field: FieldInfo) -> str:
        name = key.rpartition(".")[2]
        instead, value = field_text(field, "derived"), look_up(values, key)
        if ranks is not None and key == "layout.data":
            instead += f": {data_ranks(deck, ranks)} on {ranks} ranks"
        if value is not None:
            text = f"{name} = {toml_value(value)}"
            return f"# {text}  # {instead}" if key in following else text
        preset = preset_named(deck.model.preset) if key == "model.experts" else None
        return f'{name} = "{NONE}"' if preset is not None and preset.experts else f"# {name}: {instead}"

    lines: list[str] = []
    for table in tables():
        if "." in table and look_up(values, table) is None:
            continue
        own = [
            line(key, field)
            for name, field in fields(table).items()
            if is_in_resolved_deck(key := f"{table}.{name}", *has)
            and not selecting_key(field)
            and (table_class(field) is None or look_up(values, key) is None)
        ]
        if own:
            lines += ["", f"[{table}]", *own]
    return "\n".join(lines[1:]) + "\n"


def toml_compatible(name: str, value: object) -> Any:
    """Return a value with the types that keys of a deck have, which TOML has too.

    Paths become text, tuples lists, and NumPy scalars numbers. Text, numbers and booleans stay as they are.
    Items of lists and dictionaries are converted, too. `value` itself is not changed.

    Args:
        name: Name of the value, with which messages begin.
        value: The value; None stands for a key that the deck does not have, and is returned as it is.

    Raises:
        HpctrainError: The value or an item has another type, such as a date (which TOML has, but no key of a
            deck), an array or a set; a key of a dictionary is not text; or an item of a list or dictionary is
            None.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _compatible_item(f"{name}.{key}", each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_compatible_item(name, each) for each in value]
    numpy = sys.modules.get("numpy")  # a program that passes a NumPy value has imported NumPy
    if numpy is not None and isinstance(value, numpy.generic):
        return toml_compatible(name, value.item())
    raise HpctrainError(
        f"{name}: {kind_of(value)} cannot be a value of a deck (use text, numbers, booleans, lists of these, "
        "or dicts with names)"
    )


def _compatible_item(name: str, value: object) -> Any:
    if value is None:
        raise HpctrainError(f"{name}: None cannot be a value of a deck (leave it out)")
    return toml_compatible(name, value)


def tables_to_toml(deck: Mapping[str, object]) -> str:
    """Return a deck that a Python program has as a dictionary as TOML text.

    Whether sections and keys exist is not checked. `toml_compatible` converts the values. If a key is given
    twice, the last one counts.

    Args:
        deck: Sections with their keys, {"run": {"steps": 10}}, or full names of keys, {"run.steps": 10}, or
            both. A key of a table in a section is {"optimizer": {"muon": {"momentum": 0.9}}} or
            {"optimizer.muon.momentum": 0.9}. A key whose value is None is left out. A list of dictionaries
            becomes tables [[name]].

    Raises:
        HpctrainError: A name is not text, or a value has a type that TOML does not have.
    """
    if not all(isinstance(name, str) for name in deck):
        raise HpctrainError(
            'the deck: must have names of sections or keys that are text, such as {"run": {"steps": 10}}'
        )
    top: list[str] = []  # include, and sections that are a word
    rows: list[str] = []
    sections: dict[str, dict[str, object]] = {}
    for name, value in deck.items():
        section, dot, key = name.partition(".")
        if dot:
            _put(sections.setdefault(section, {}), key.split("."), toml_compatible(name, value))
        elif isinstance(value, Mapping):
            for key, each in value.items():
                _put(sections.setdefault(name, {}), [key], toml_compatible(f"{name}.{key}", each))
            sections.setdefault(name, {})
        elif _is_list_of_tables(value):
            for row in value:
                rows += ["", f"[[{toml_key(name)}]]", *_key_lines(toml_compatible(name, row))]
        else:
            top += _key_lines({name: toml_compatible(name, value)})
    for name, keys in sections.items():
        rows += ["", f"[{toml_key(name)}]", *_key_lines(keys)]
    return "\n".join([*top, *rows]) + "\n"


def _put(table: dict[str, object], path: Sequence[str], value: object) -> None:
    """Set a key of a table, or of a table in it, or remove the key if its value is None."""
    name, *inner = path
    table_before = table.get(name)
    own: dict[str, object] = table_before if isinstance(table_before, dict) else {}
    if inner:
        _put(own, inner, value)
        if own:
            table[name] = own
    elif isinstance(value, dict):
        for key, each in value.items():
            _put(own, [key], each)
        table[name] = own
    elif value is None:
        table.pop(name, None)
    else:
        table[name] = value


def _key_lines(keys: Mapping[str, object]) -> Iterator[str]:
    for key, value in keys.items():
        if value is not None:
            yield f"{toml_key(key)} = {toml_value(value)}"


def _is_list_of_tables(value: object) -> TypeGuard[Sequence[Mapping[str, object]]]:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(row, Mapping) for row in value)
