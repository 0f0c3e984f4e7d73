"""Description of the keys of a deck: type, bounds, default, unit, one line of help, and name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator
from pydantic.fields import FieldInfo
from typing_extensions import Self

from hpctrain.units import parse_bytes, parse_link, parse_seconds

Bytes = Annotated[int, BeforeValidator(lambda value: parse_bytes(value) if isinstance(value, str) else value)]
"""Size in bytes, which a deck may have as a number or as a text such as "25 MB"."""

Duration = Annotated[
    float, BeforeValidator(lambda value: parse_seconds(value) if isinstance(value, str) else value)
]
"""Time in seconds, which a deck may have as a number or as a text such as "50 min"."""


Whole = Annotated[
    int,
    BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value),
]
"""Whole number, which a deck may also have in the form 1e9."""


def expand_user_path(path: str) -> str:
    """Return a path with "~" or "~user" at its beginning replaced by the home folder, as shells do.

    Other paths, and those of unknown users, are returned as they are. The path need not exist.
    """
    return os.path.expanduser(path) if path.startswith("~") else path  # noqa: PTH111 - "~" alone stays text


PathText = Annotated[str, AfterValidator(expand_user_path)]
"""Path with "~" expanded; some keys also take a name or "FILE.py:FUNCTION"."""


def _link(value: str) -> str:
    parse_link(value)
    return value


LinkText = Annotated[str, AfterValidator(_link)]
"""Bandwidth and latency of a link as text, such as "100 Mbit/s, 20 ms"."""


def key(text: str, default: Any = ..., *, unit: str = "", derived: str = "", **bounds: Any) -> Any:
    """Return the pydantic field of a key, which is assigned to an attribute of a Section class.

    Args:
        text: One line of help for `hpctrain deck --reference`.
        default: Default of the key. Leave it out for a key that a deck must give, and for a key whose default
            follows from other keys: `reading/defaults.py` computes that value before the validation.
        unit: Unit of the value in words, such as "steps"; "" if it has none.
        derived: Default that follows from other keys, or the meaning of the default None, in words for the
            reference; "" for other keys.
        bounds: Bounds (`ge`, `gt`, `le`, `lt`), and `alias` if the key's name is not a Python identifier.
    """
    return Field(default, description=text, json_schema_extra={"unit": unit, "derived": derived}, **bounds)


def table(text: str, *, selected_by: str = "", derived: str = "none", **field_arguments: Any) -> Any:
    """Return the pydantic field of a key that holds a table with keys of its own, or None, its default.

    Args:
        text: One line of help for `hpctrain deck --reference`.
        selected_by: Key of the same section that has the name of this table as its value if, and only if, the
            deck has the table. "" for a table that a deck may have or not.
        derived: Description of what an absent table means. It is ignored if `selected_by` is given.
        field_arguments: Further arguments of `pydantic.Field`, such as `alias`.
    """
    derived = "" if selected_by else derived
    stored: dict[str, JsonValue] = {"unit": "", "derived": derived, "selected_by": selected_by}
    return Field(None, description=text, json_schema_extra=stored, **field_arguments)


class Section(BaseModel):
    """Base class of all tables of a deck."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def choices(cls) -> dict[str, dict[str, str]]:
        """Return the tables among which keys of this section select; empty if none does.

        Returns:
            For each key that selects tables, by its name, a dictionary from its values to attributes of this
            class. A value of the key is the name of the selected table in the deck. Values without a table
            are left out. An example is that of [optimizer]:
            {"name": {"adamw": "adamw", ..., "schedule-free": "schedule_free"}}.
        """
        found: dict[str, dict[str, str]] = {}
        for attribute, field in cls.model_fields.items():
            if choice := selecting_key(field):
                found.setdefault(choice, {})[key_name(attribute, field)] = attribute
        return found

    def selected_table(self, choice: str) -> Section | None:
        """Return the table that the value of a key selects; None if that value has no table.

        Args:
            choice: Name of the key, such as "name" in [optimizer].

        Raises:
            KeyError: The key does not select tables.
        """
        attribute = self.choices()[choice].get(getattr(self, choice))
        return None if attribute is None else getattr(self, attribute)

    def with_values(self, values: Mapping[str, object]) -> Self:
        """Return a copy in which some keys have other values. Neither names nor values are checked.

        A wrong name of a key raises no error and changes no key.

        Args:
            values: Values by name: of an attribute, such as "schedule_free" (not "schedule-free"), or
                "table.key" for a key of a table, both by their attributes. The latter is left out if the copy
                does not have that table. The value of a key that selects tables also decides which tables the
                copy has: the selected one, kept or made with its defaults; the others are None. "table.key"
                then changes the tables of the copy.

        Raises:
            AttributeError: The class has no such table as in "table.key".
        """
        changed = {name: value for name, value in values.items() if "." not in name}
        for choice, tables in self.choices().items():
            for name, attribute in tables.items() if choice in values else ():
                kind = table_class(type(self).model_fields[attribute])
                assert kind is not None
                current = changed.get(attribute, getattr(self, attribute))
                changed[attribute] = (current or kind()) if name == values[choice] else None
        inner: dict[str, dict[str, object]] = {}
        for name, value in values.items():
            table, dot, rest = name.partition(".")
            if dot:
                inner.setdefault(table, {})[rest] = value
        for table, own in inner.items():
            current = changed.get(table, getattr(self, table))
            if isinstance(current, Section):
                changed[table] = current.with_values(own)
        return self.model_copy(update=changed)

    def with_selection(self, choice: str, name: str, table: Section | None, **keys: object) -> Self:
        """Return a copy in which the key `choice` has the value `name`. Neither names nor values are checked.

        Use this if you have the table that `name` selects; `with_values` makes or keeps that table itself.

        Args:
            choice: Name of a key that selects tables, such as "name" in [optimizer].
            name: Its new value.
            table: Table that this value selects, which is not made here; None for a value without a table. It
                goes to the attribute that `choices` has for `name`; its class is not checked. The other
                tables of the key become None.
            keys: New values of further attributes.

        Raises:
            KeyError: The key `choice` does not select tables.
        """
        tables = {own: table if each == name else None for each, own in self.choices()[choice].items()}
        return self.model_copy(update={choice: name, **tables, **keys})

    @model_validator(mode="after")
    def _has_selected_tables_only(self) -> Self:
        for choice, tables in self.choices().items():
            value = getattr(self, choice)
            if wrong := [
                name for name, own in tables.items() if (getattr(self, own) is None) == (name == value)
            ]:
                raise ValueError(f"{choice} = {value!r} does not fit the tables {wrong}")
        return self


def field_text(field: FieldInfo, name: Literal["unit", "derived"]) -> str:
    """Return a text that was declared with a key: its unit, or the default that follows from other keys.

    Args:
        field: Field that `key` or `table` returned.
        name: "unit", or "derived" for the default in words.

    Returns:
        The text; "" if the key has no unit, or no such default.
    """
    stored = field.json_schema_extra
    return str(stored[name]) if isinstance(stored, dict) else ""


def key_name(attribute: str, field: FieldInfo) -> str:
    """Return the name of a key in decks: the alias of its field if it has one, otherwise `attribute`.

    Args:
        attribute: Name of the attribute of the section, such as "source".
        field: Field of this attribute, whose alias may be "from".
    """
    return field.alias or attribute


def table_class(field: FieldInfo) -> type[Section] | None:
    """Return the class of the table that a key holds, such as `Adapters` for [model.adapters].

    The result is None for a key with any other value, also if it holds a list of tables.
    """
    is_union = get_origin(field.annotation) in {Union, UnionType}
    kinds = get_args(field.annotation) if is_union else (field.annotation,)
    kind = next((kind for kind in kinds if kind is not type(None)), None)
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def selecting_key(field: FieldInfo) -> str:
    """Return the name of the key whose value selects the table that a field holds; "" if none does.

    That key is in the same table as the field: "name" for [optimizer.adamw]. The result is "" for optional
    tables, such as [model.adapters], and for fields that hold no table.
    """
    stored = field.json_schema_extra
    return str(stored.get("selected_by", "")) if isinstance(stored, dict) else ""
