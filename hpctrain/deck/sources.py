"""Places in which the keys of a deck were given, and the form of keys and values in messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from pydantic import BaseModel

from hpctrain.text import escaped

if TYPE_CHECKING:
    from hpctrain.deck.code import CodeEntry

LONGEST_SHOWN = 200
"""Largest number of characters of the user's text that a message repeats."""


class ApiArgument(str):
    """Value with which a call of the Python API overrides a key of a deck, in the form of `--set`.

    Attributes:
        name: Name of the argument of the call, which messages show.
    """

    name: str

    @classmethod
    def of(cls, name: str, argument: str) -> ApiArgument:
        """Return the text `argument`, such as "run.steps=10", with the name of an argument of the call.

        The result is used like any other `--set` argument; only messages show the name.

        Args:
            name: Name of the argument of the Python call, such as "changes".
            argument: Key and value in the form of `--set`.
        """
        named = cls(argument)
        named.name = name
        return named


@dataclass(frozen=True)
class Place:
    """Place in which a key was given: file and line or `--set` argument, and the value as written.

    Attributes:
        file: Name of the deck's file.
        line: Line of the file, counted from 1; None if it is not known.
        override: The `--set` argument that gave the key; None if the file did.
        value: Value that was written there.
        note: How a key that was not written got its value, such as "from the preset"; "" if it was written.
    """

    file: str
    line: int | None = None
    override: str | None = None
    value: object = None
    note: str = ""

    @property
    def prefix(self) -> str:
        """Beginning of a message, such as `deck.toml:14`, `--set a.b=value` or `changes: a.b=value`."""
        if isinstance(self.override, ApiArgument):
            return f"{self.override.name}: {clipped(self.override)}"
        if self.override is not None:
            return f"--set {clipped(self.override)}"
        return self.file if self.line is None else f"{self.file}:{self.line}"

    @property
    def line_text(self) -> str:
        """End of a phrase that names the line, such as " on line 14"; "" if it is not known."""
        return "" if self.line is None else f" on line {self.line}"


@dataclass(frozen=True)
class Sources:
    """Places in which the keys of a deck were given.

    All Sources are equal, so that decks with the same values are equal wherever they were written. Copies and
    pickles have no places.

    Attributes:
        name: Name of the deck's file.
        places: Place of each key by its full name, such as "batch.micro_size".
        defaulted: Keys that were not given, and whose default depends on other keys.
        trusted_code: Code of the deck that may be called; None if all may, since the user passed the deck.
    """

    name: str = field(default="deck", compare=False)
    places: Mapping[str, Place] = field(default_factory=lambda: MappingProxyType({}), compare=False)
    defaulted: frozenset[str] = field(default=frozenset(), compare=False)
    trusted_code: frozenset[CodeEntry] | None = field(default=None, compare=False)

    def __reduce__(
        self,
    ) -> tuple[type[Sources], tuple[str, dict[str, Place], frozenset[str], frozenset[CodeEntry] | None]]:
        """Return the arguments of a copy or a pickle, which has everything except the places."""
        return Sources, (self.name, {}, self.defaulted, self.trusted_code)

    def place(self, key: str) -> Place:
        """Return the place of a key.

        For a key that was not given, it is a Place with the name of the deck, no line and the note "default".

        Args:
            key: Full name of the key; names that the schema does not have are not refused.
        """
        return self.places.get(key, Place(self.name, note="default"))

    def sentence(self, key: str, value: object, problem: str) -> str:
        """Return a message about a key, such as `deck.toml:14: layout.tensor = 3: must divide ...`.

        A key of a `--set` argument is shown as in that argument: `--set layout.tensor=3: must divide ...`. A
        key that was not given has the name of the deck without a line: `deck.toml: layout.tensor = 1
        (default): ...`.

        Args:
            key: Full name of the key.
            value: Its value, which the message shows if the place has no `value` or has a `note`, as for a
                default; otherwise it shows the value as written. None to show none in these cases.
            problem: End of the sentence.
        """
        place = self.place(key)
        if place.override is not None and not place.note:
            return f"{place.prefix}: {problem}"
        written = value if place.note or place.value is None else place.value
        note = f" ({place.note})" if place.note else ""
        shown = "" if written is None else f" = {clipped(toml_value(written))}"
        return f"{place.prefix}: {clipped(key)}{shown}{note}: {problem}"


def clipped(text: str) -> str:
    """Return a text; if it has more than LONGEST_SHOWN characters, its beginning followed by "..."."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def clipped_json(value: object) -> str:
    """Return a value of the user's JSON as a message shows it: in JSON on one line, clipped."""
    return clipped(json.dumps(value, ensure_ascii=False, default=str))


def toml_value(value: object) -> str:
    """Return a value in TOML notation on one line.

    A Section becomes an inline table without keys that are None. Values of types that TOML does not have,
    such as None, are returned as `str` writes them.
    """
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # TOML has the escapes of JSON, but requires them for further control characters, such as DEL.
            return escaped(json.dumps(value, ensure_ascii=False))
        case list() | tuple():
            return "[" + ", ".join(toml_value(item) for item in value) + "]"
        case dict():
            items = (f"{toml_key(name)} = {toml_value(item)}" for name, item in value.items())
            return "{" + ", ".join(items) + "}"
        case BaseModel():
            return toml_value(value.model_dump(exclude_none=True))
        case _:
            return str(value)


def toml_key(name: str) -> str:
    """Return the name of a key in TOML notation, in quotes if it needs them."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)
