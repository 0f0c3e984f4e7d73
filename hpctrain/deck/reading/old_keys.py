"""Names that keys of a deck had before, and how a deck that has them is read.

`old_keys.toml` lists them. A key that moved into a table that a choice selects is dropped if the deck makes
another choice and the key has its default there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic.fields import FieldInfo

from hpctrain.deck.key import selecting_key
from hpctrain.deck.reading.nested import look_up, table_in
from hpctrain.deck.schema import field_of, fields, tables
from hpctrain.deck.sources import Place, toml_value
from hpctrain.deck.toml import read_data_file

NONE = "none"
"""Value that a deck may give to a key of an optional table, to have no such table."""


def old_keys() -> Mapping[str, str]:
    """Return the full name that each old key has now, by its old full name. Do not change the mapping.

    "{name}" in a present name stands for the value of the key `name` of the same table: "optimizer.beta1" is
    now "optimizer.{name}.beta1", such as "optimizer.adamw.beta1".
    """
    names: Mapping[str, str] = read_data_file("old_keys.toml")["names"]
    return names


def _off_values() -> Mapping[str, object]:
    """Return the value of each old key that switched the optional table of its present key off."""
    values: Mapping[str, object] = read_data_file("old_keys.toml")["off"]
    return values


def current_field(key: str) -> FieldInfo | None:
    """Return the field of a key by its present or an old full name; None if there never was such a key.

    For an old key with several possible new names, this is the field of the first.
    """
    names = new_names(key)
    return field_of(names[0] if names else key)


def new_names(key: str) -> list[str]:
    """Return all full names that an old key may have now, depending on choices; empty if it is no old key."""
    path, brace, rest = old_keys().get(key, "").partition(".{")
    if not brace:
        return [path] if path else []
    choice, _, own = rest.partition("}")
    names = (f"{path}.{table}{own}" for table in tables()[path].choices()[choice])
    return [name for name in names if field_of(name) is not None]


def other_names(key: str, values: Mapping[str, Any] | None = None) -> list[str]:
    """Return the new names of an old key, or the old names of a present key or of the keys of a table.

    The name of a present table counts as present, even if it is an old key, too. Old keys that are tables now
    are left out, since a DeckInput never has their old values.

    Args:
        key: Full name of a key or a table.
        values: Sections of the deck by name. If they are given, only old names are returned that stand for
            `key` under the choices in them: "optimizer.beta1" is an old name of "optimizer.adamw.beta1" only
            if the optimizer is "adamw".

    Returns:
        Full names in the order of `old_keys.toml`, or of the tables that a choice selects; empty if there is
        none.
    """
    if key not in tables() and (names := new_names(key)):
        return names
    return [
        old
        for old in old_keys()
        for name in new_names(old)
        if old not in tables() and f"{name}.".startswith(f"{key}.")
        if values is None or not _preventing_key(name, values, lambda _: True)
    ]


@dataclass(frozen=True)
class RenamedKey:
    """Old key that a deck has, with its new name and value, and its problem if it has no effect.

    Attributes:
        old: Its old name.
        new: Its new name; "" if it has no effect and was dropped.
        place: Where it was written.
        value: Its value.
        problem: End of a sentence if it has no effect and another value than its default, or if the same file
            contradicts it; else "".
    """

    old: str
    new: str
    place: Place
    value: object
    problem: str = ""

    @property
    def warning(self) -> str:
        """Message, such as "deck.toml:8: model.experts is now model.experts.count". Nothing is logged."""
        now = f"is now {self.new or new_names(self.old)[0]}"
        if not self.new:
            homes = dict.fromkeys(f"[{name.rpartition('.')[0]}]" for name in new_names(self.old))
            now = f"is now a key of {' and '.join(homes)}, and has no effect here"
        return f"{self.place.prefix}: {self.old} {now}"


def rename_keys(
    values: dict[str, Any], places: dict[str, Place], has_table: Callable[[str], bool]
) -> list[RenamedKey]:
    """Move the values and places of old keys to their new names, in place; return what was moved or dropped.

    No problem is reported: the caller looks at `problem` of each result, which is "" if there is none. If the
    new key is given as well, its value stays, and different values are a problem.

    Args:
        values: Sections of a deck by name, before their validation. The new name of a key may depend on a key
            that selects tables, such as optimizer.name. If that is missing, its selected table, or else its
            default, decides.
        places: Places of its keys by full name; each old key in `values` has one.
        has_table: Function that takes the full name of an optional table, and returns True if the preset or
            the model of model.from sets keys of it, so that the deck has the table without giving it.
    """
    written = {}
    for key in old_keys():
        section, _, name = key.rpartition(".")
        if key not in tables() and isinstance(table := values.get(section), dict) and name in table:
            written[key] = table.pop(name)
    off = _off_values()
    switched_on = {
        table
        for key, value in written.items()
        if key in off and value != off[key]
        for table in optional_tables(new_names(key)[0])
    }
    renamed = []
    for key, value in written.items():
        place, names, problem = places.pop(key), new_names(key), ""
        preventing = [
            _preventing_key(name, values, lambda table: table in switched_on or has_table(table))
            for name in names
        ]
        new = next((name for name, key in zip(names, preventing, strict=True) if not key), "")
        has_effect = value != off.get(key, _default(names[0]))
        closed = next((table for table in optional_tables(names[0]) if look_up(values, table) == NONE), "")
        if closed and has_effect:
            new, problem = "", f'has no effect with {closed} = "{NONE}" (leave one of them out)'
        elif new and look_up(values, new) is None:
            _put(values, places, new, value, place)
        elif new and (second := places[new]).value != value:
            problem = f"conflicts with {new}{second.line_text}, its new name (leave one of them out)"
        elif not new and has_effect and not _has_wrong_choice(values, preventing[-1]):
            problem = f"has no effect {_condition(values, preventing[-1])} (leave it out)"
        renamed.append(RenamedKey(key, new, place, value, problem))
    return renamed


def renamed_word(key: str, value: object, place: Place) -> tuple[object, RenamedKey | None]:
    """Return what replaces the value of a key that is a table now, but was a key with values before.

    Nothing is changed in place.

    Args:
        key: Full name of the key.
        value: Its value as written.
        place: Place where it was written.

    Returns:
        For an old value, the table in its place, or "none" if the value switched the table off, and the
        RenamedKey. For all other keys and values, such as tables, `value` itself and None.
    """
    if key not in old_keys() or key not in tables():
        return value, None
    new, off = old_keys()[key], _off_values()[key]
    if type(value) is not type(off) or (value == NONE != off):
        return value, None
    table = NONE if value == off else {new.rpartition(".")[2]: value}
    return table, RenamedKey(key, new, place, value)


def _preventing_key(name: str, values: Mapping[str, Any], has_table: Callable[[str], bool]) -> str:
    """Return the choice, or the absent table, because of which a deck has no key `name`; "" if it has."""
    for table in _tables_above(name):
        path, _, own = table.rpartition(".")
        choice = selecting_key(fields(path)[own])
        if choice and _chosen(values, f"{path}.{choice}") != own:
            return f"{path}.{choice}"
        if not choice and not has_table(table) and not isinstance(look_up(values, table), dict):
            return table
    return ""


def is_choice(key: str, value: object) -> bool:
    """Return True if a value is allowed for a key that selects tables, such as "adamw" for optimizer.name.

    It is False, too, if there is no such key.
    """
    field = field_of(key)
    return field is not None and value in get_args(field.annotation)


def _has_wrong_choice(values: Mapping[str, Any], key: str) -> bool:
    """Return True if a key that selects tables has a wrong value, which is reported by itself."""
    return key not in tables() and not is_choice(key, _chosen(values, key))


def _condition(values: Mapping[str, Any], key: str) -> str:
    """Return a choice with its value, or an absent table, as a message names it."""
    if key in tables():
        return f"without [{key}]"
    return f"with {key} = {toml_value(_chosen(values, key))}"


def _chosen(values: Mapping[str, Any], key: str) -> object:
    """Return the value of a key that selects a table: as given, of a table that is given, or the default."""
    path, _, choice = key.rpartition(".")
    names = tables()[path].choices()[choice]
    given = (name for name in names if isinstance(look_up(values, f"{path}.{name}"), dict))
    return look_up(values, key, next(given, _default(key)))


def _default(key: str) -> object:
    field = field_of(key)
    return None if field is None or field.is_required() else field.default


def _tables_above(key: str) -> Iterator[str]:
    """Yield the full names of the tables that a key is in, the outermost first; without the section."""
    parts = key.split(".")
    yield from (".".join(parts[:length]) for length in range(2, len(parts)))


def optional_tables(key: str) -> list[str]:
    """Return the full names of the tables that a key is in and that no choice selects; empty for old keys."""
    return [table for table in _tables_above(key) if (field := field_of(table)) and not selecting_key(field)]


def _put(values: dict[str, Any], places: dict[str, Place], key: str, value: object, place: Place) -> None:
    """Write a value and its place under the present name of its key."""
    path, _, name = key.rpartition(".")
    table_in(values, path)[name], places[key] = value, place
    for above in _tables_above(key):
        places.setdefault(above, place)
