"""Messages about keys: which values are allowed, and which name was probably meant."""

from __future__ import annotations

from math import isfinite
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from hpctrain.deck.key import Section, field_text, selecting_key, table_class
from hpctrain.deck.schema import field_of, fields, sections, tables
from hpctrain.deck.sources import toml_value
from hpctrain.text import either, nearest

MOST_WORDS = 40
"""Largest number of words that a message lists. Only model.preset allows more."""


def expected_value(field: FieldInfo) -> str:
    """Return the values that a key allows in words, such as "a whole number of at least 1"."""
    kind = value_type(field)
    if get_origin(kind) is Literal:
        if len(get_args(kind)) > MOST_WORDS:
            return "a preset that `hpctrain deck --reference model` lists"
        return either([toml_value(choice) for choice in get_args(kind)])
    if kind is bool:
        return either(["true", "false", *map(toml_value, _choices(field))])
    if field_text(field, "unit") == "bit/s":
        return 'a link of at least 1 kbit/s, such as "100 Mbit/s, 20 ms"'
    if kind is str and field_text(field, "unit") == "ranks":
        return 'ranks such as "4-7", or "policy"'
    if kind is str:
        return "text in quotes that is not empty" + ", or a list of texts" * accepts_list(field)
    if get_origin(kind) is dict:
        return either(["a table", *map(toml_value, _choices(field))])
    if table_class(field) is not None:
        return "a table" + ', or "none" for no table' * (not selecting_key(field))
    if row_section(field) is not None:
        return "a list of tables, such as [[evaluation]]"
    if get_origin(kind) is tuple:
        words = {str: "texts in quotes", bool: "true and false", int: "whole numbers", float: "numbers"}
        items = words.get(_unconstrained(get_args(kind)[0]), "tables")
        return either([f"a list of {items}", *map(toml_value, _choices(field))])
    if field_text(field, "unit") == "bytes":
        return 'a size above 0, such as 25000000 or "25 MB"'
    if field_text(field, "unit") == "seconds":
        return f'a time{_bounds(field)}, such as 3000 or "50 min"'
    number = ("a whole number" if kind is int else "a number") + _bounds(field)
    return either([number, *map(toml_value, _choices(field))])


def _types(field: FieldInfo) -> list[Any]:
    """Return the types of values that a key allows, without None and without constraints."""
    is_union = get_origin(field.annotation) in {Union, UnionType}
    kinds = get_args(field.annotation) if is_union else (field.annotation,)
    return [_unconstrained(kind) for kind in kinds if kind is not NoneType]


def _unconstrained(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def value_type(field: FieldInfo) -> Any:
    """Return the first type of values that a key allows other than None, without constraints.

    It is a class such as int, or a type such as `Literal[...]`, `tuple[...]` or `dict[...]`.
    """
    return _types(field)[0]


def accepts_list(field: FieldInfo) -> bool:
    """Return True if a key allows a text or a list of texts, as data.tokens does."""
    return str in _types(field) and any(get_origin(kind) is tuple for kind in _types(field))


def row_section(field: FieldInfo) -> type[Section] | None:
    """Return the class of the tables in a list of tables that a key holds, such as `EvaluationSet`.

    The result is None for keys that hold something else, also for a single table.
    """
    kind = value_type(field)
    row = get_args(kind)[0] if get_origin(kind) is tuple else None
    return row if isinstance(row, type) and issubclass(row, Section) else None


def _choices(field: FieldInfo) -> list[str]:
    """Return the fixed words that a key allows, perhaps among other values."""
    return [str(word) for kind in _types(field) if get_origin(kind) is Literal for word in get_args(kind)]


def value_hint(value: object, field: FieldInfo) -> str:
    """Return what follows "must be ..." in a message about a wrong value; "" if there is nothing to add.

    It says how the value is wrong (", not a number") or which word was meant (" (did you mean ...?)").
    """
    kind, choices = value_type(field), _choices(field)
    if choices and (get_origin(kind) is Literal or isinstance(value, str)):
        near = nearest(str(value).lower(), choices)
        return f" (did you mean {toml_value(near)}?)" if near else ""
    match value:
        case bool():
            return f", not {toml_value(value)}"
        case str() if table_class(field) is not None and not selecting_key(field):
            return f", not {toml_value(value)}"
        case str() if kind is not str and field_text(field, "unit") not in {"bytes", "seconds"}:
            return f", not text{_without_quotes(value)}"
        case int() | float() if kind is str:
            return ", not a number"
        case float() if kind is int:
            if value.is_integer():
                return f" (write {int(value)})"
            return ", not a fraction" if isfinite(value) else ""
        case list() if table_class(field) is not None and all(isinstance(row, dict) for row in value):
            return ", not a list of tables (write its name in single brackets, not in [[ ]])"
        case list():
            return "" if get_origin(kind) is tuple or accepts_list(field) else ", not a list"
        case dict():
            return ", not a table"
        case float() if not isfinite(value):
            return ", and finite"
        case str() | int() | float():
            return ""
        case _:
            return ", not a date or time"


def unknown_key(table: str, name: str) -> str:
    """Return the end of a message about a key that does not exist: "unknown key (did you mean ...?)".

    The message may suggest keys of other tables. If no key is similar, it names the keys of the table, or the
    sections if there is no such table. Nothing is raised.

    Args:
        table: Full name of the table in which it was given, which need not exist; "" for the top of the deck.
        name: Name of the key.
    """
    if "." in name and field_of(unquoted := f"{table}.{name}".lstrip(".")) is not None:
        return f"unknown key (write {unquoted} without quotes)"
    if field_of(name) is not None:
        return f"unknown key (did you mean {name.rpartition('.')[2]} in [{name.rpartition('.')[0]}]?)"
    homes = [f"{home}.{name}" for home in tables() if name in fields(home)]
    own = nearest(name, fields(table)) if table in tables() else None
    if homes and not (own and "." in table):
        meant = homes
    elif own:
        meant = [f"{table}.{own}"]
    else:
        full = {f"{home}.{known}": known for home in tables() for known in fields(home)}
        near = nearest(name, full.values())
        meant = [path for path, known in full.items() if known == near]
    if meant:
        return f"unknown key (did you mean {either(meant)}?)"
    if table in tables():
        return f"unknown key; [{table}] has {', '.join(fields(table))}"
    return f"unknown key; keys belong in the sections {', '.join(sections())}"


def unknown_section(section: str, names: list[str]) -> str:
    """Return the end of a message about a section that does not exist: "unknown section (did you mean ...?)".

    Args:
        section: Its name.
        names: Names of the keys that were given in it, by which the message may name the right section.
    """
    near = nearest(section, sections())
    if near:
        return f"unknown section (did you mean [{near}]?)"
    homes = [f"{home}.{name}" for name in names for home in tables() if name in fields(home)]
    if homes:
        return f"unknown section (did you mean {', '.join(homes)}?)"
    return f"unknown section; the sections are {', '.join(sections())}"


def _without_quotes(value: str) -> str:
    """Return a hint if a text is a number in quotes; else ""."""
    try:
        float(value)
    except ValueError:
        return ""
    return f" (write {value}, without quotes)"


def _bounds(field: FieldInfo) -> str:
    """Return the bounds of a number in words, such as " from 1 to 8"; "" if it has none."""
    limits = {
        name: getattr(mark, name)
        for mark in field.metadata
        for name in ("ge", "gt", "le", "lt")
        if hasattr(mark, name)
    }
    if "gt" in limits:
        return f" above {limits['gt']}" + (f", at most {limits['le']}" if "le" in limits else "")
    if "ge" not in limits:
        return ""
    high = f"{limits['le']}" if "le" in limits else f"below {limits['lt']}" if "lt" in limits else ""
    return f" from {limits['ge']} to {high}" if high else f" of at least {limits['ge']}"
