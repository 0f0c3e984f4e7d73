"""Where each key of a deck was given, so that a message can name the file and the line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from pydantic import BaseModel

from hpctrain.characters import escaped

if TYPE_CHECKING:
    from hpctrain.deck.code import CodeEntry

LONGEST_SHOWN = 200  # characters of what a user wrote that a sentence repeats


class ApiArgument(str):
    """What stands above a deck as `--set` has it, but is of a script, which gave it under this `name`."""

    name: str

    @classmethod
    def of(cls, name: str, argument: str) -> ApiArgument:
        """An argument with the name under which a script gave it."""
        given = cls(argument)
        given.name = name
        return given


@dataclass(frozen=True)
class Place:
    """Where one key was given: a line of a file, or a `--set` argument (then `override` is its text).

    `value` is what was written there. `note` says how a key that was not written got its value.
    """

    file: str
    line: int | None = None
    override: str | None = None
    value: object = None
    note: str = ""

    @property
    def prefix(self) -> str:
        """`deck.toml:14` (`deck.toml` where no line is known), `--set a.b=value` or `changes: a.b=value`."""
        if isinstance(self.override, ApiArgument):
            return f"{self.override.name}: {clipped(self.override)}"
        if self.override is not None:
            return f"--set {clipped(self.override)}"
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Sources:
    """Places in which the keys of a deck ("batch.micro_size") were given, and the name of the deck.

    `defaulted` are the keys that were not given and got values that follow other keys of the deck.
    `trusted_code` is the code of the deck that may be called. It is None for a deck that the user passed:
    then all code may be called. All Sources are equal: decks with the same values are the same deck, wherever
    they were written.
    """

    name: str = field(default="deck", compare=False)
    places: Mapping[str, Place] = field(default_factory=lambda: MappingProxyType({}), compare=False)
    defaulted: frozenset[str] = field(default=frozenset(), compare=False)
    trusted_code: frozenset[CodeEntry] | None = field(default=None, compare=False)

    def __reduce__(
        self,
    ) -> tuple[type[Sources], tuple[str, dict[str, Place], frozenset[str], frozenset[CodeEntry] | None]]:
        """Leave the places out of copies and pickles: they matter only where the deck was read."""
        return Sources, (self.name, {}, self.defaulted, self.trusted_code)

    def place(self, key: str) -> Place:
        """The place of a key; of one that was not given, the deck as a whole."""
        return self.places.get(key, Place(self.name, note="default"))

    def sentence(self, key: str, value: object, problem: str) -> str:
        """`deck.toml:14: layout.tensor = 3: must divide model.heads = 8 (1, 2, 4 or 8 would)`."""
        place = self.place(key)
        if place.override is not None and not place.note:
            return f"{place.prefix}: {problem}"
        written = value if place.note or place.value is None else place.value
        note = f" ({place.note})" if place.note else ""
        return f"{place.prefix}: {clipped(key)} = {clipped(toml_value(written))}{note}: {problem}"


def clipped(text: str) -> str:
    """The text, or its beginning where it is too long for a sentence."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def toml_value(value: object) -> str:
    """A value as TOML writes it, on one line."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # JSON's escapes are TOML's; JSON leaves DEL, which TOML wants escaped too, and the like.
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
    """A key of a table, in quotes where it needs them."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)
