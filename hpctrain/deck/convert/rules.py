"""What a setting of another program becomes: keys of a deck, nothing, or a sentence why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from hpctrain.deck.schema import fields
from hpctrain.deck.sources import clipped
from hpctrain.deck.words import wanted
from hpctrain.words import either

Keys = Mapping[str, object]
"""Values of a deck's keys, by their full names."""


class UntranslatedError(Exception):
    """A setting has no key, or only a part of it has. The message completes a sentence about the setting."""


class Theirs:
    """Settings of another program by name, as it spells them, with its defaults for those that it is not
    told. Values are texts, numbers, truths, or lists of these.
    """

    def __init__(self, given: Mapping[str, object], defaults: Mapping[str, object] | None = None) -> None:
        self.given = dict(given)
        self.notes: dict[str, str] = {}
        """What remains to be done for settings that became keys, by name."""
        self.defaults = {name: value for name, value in (defaults or {}).items() if name not in given}

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def get(self, name: str) -> object:
        """Return the value of a setting or its default; None if it has neither."""
        return self.given.get(name, self.defaults.get(name))

    def is_on(self, name: str) -> bool:
        """Return True if a switch is on."""
        return _is(self.get(name), on=True)

    def number(self, name: str) -> float | None:
        """Return the value of a setting as a float; None if it is no number."""
        try:
            return number(self.get(name))
        except UntranslatedError:
            return None

    def whole(self, name: str) -> int | None:
        """Return the value of a setting as an integer; None if it is no integer."""
        try:
            return whole(self.get(name))
        except UntranslatedError:
            return None


_MOST_DIGITS = 100
_UNSET = "is a variable of the shell that the script does not set, or sets in several ways"
_UNKNOWN_ARITHMETIC = "is arithmetic that is not evaluated here (+ - * / % of whole numbers are)"

Rule = Callable[[object, Theirs], Keys]
"""The keys of a setting with a value; raises UntranslatedError."""


@dataclass
class Translated:
    """Keys, those of them that are another program's defaults, what could not be said in them, by setting
    with its value, and settings that need none.
    """

    keys: dict[str, object] = field(default_factory=dict)
    defaults: set[str] = field(default_factory=set)
    left: dict[str, str] = field(default_factory=dict)
    needless: list[str] = field(default_factory=list)

    def leave(self, name: str, value: object, why: str) -> None:
        """A setting that becomes no key, or not all of it."""
        self.left[name if value is True else f"{name} = {clipped(str(value))}"] = why


def translate(theirs: Theirs, rules: Mapping[str, Rule], unknown: str) -> Translated:
    """Translate settings by the rules for their names; `unknown` is the report about all others."""
    found = Translated()
    for name, value in (theirs.given | theirs.defaults).items():
        given = name in theirs
        try:
            if name not in rules:
                raise UntranslatedError(unknown)
            keys = rules[name](value, theirs)
            _require_possible(keys)
        except UntranslatedError as error:
            found.leave(name, value, str(error) if given else f"{error} (that is its default)")
            continue
        if given and not keys:
            found.needless.append(name)
        if name in theirs.notes:
            found.leave(name, value, theirs.notes[name])
        for key, here in keys.items():
            if not given and key not in found.keys:  # those that are given came before
                found.defaults.add(key)
            before = found.keys.setdefault(key, here)
            if before != here and given:
                found.leave(name, value, f"asks for {key} = {here}, another setting for {before}")
    return found


def _require_possible(keys: Keys) -> None:
    """Raise UntranslatedError where a key cannot be so in any deck."""
    for key, value in keys.items():
        section, _, name = key.partition(".")
        field = fields(section)[name]
        kind: Any = field.annotation
        for mark in field.metadata:
            kind = Annotated[kind, mark]
        try:
            TypeAdapter(kind).validate_python(value)
        except ValidationError:
            raise UntranslatedError(f"is in a deck {key}, which is {wanted(field)}") from None


def number(value: object) -> float:
    """Return a number, given as a number or as text."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            found = float(value)
        except (ValueError, OverflowError):
            found = float("nan")
        if isfinite(found):
            return found
    raise UntranslatedError(_unknown(value) or "is no number")


def whole(value: object) -> int:
    """Return an integer, given as an integer or as text."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.isdecimal() and len(value) <= _MOST_DIGITS:
        return int(value)  # which a fraction may not hold
    found = number(value)
    if found != int(found):
        raise UntranslatedError("is no whole number")
    return int(found)


def text(value: object) -> str:
    """Return a text."""
    if not isinstance(value, str) or not value or "$" in value:
        raise UntranslatedError(_unknown(value) or "is no text")
    return value


def _unknown(value: object) -> str:
    """Return why an expression of the shell has no value here; "" if the value is none."""
    if "$((" in str(value):
        return _UNKNOWN_ARITHMETIC
    return _UNSET if "$" in str(value) else ""


def switch(value: object) -> bool:
    """Return True or False for a switch."""
    for on in (True, False):
        if _is(value, on):
            return on
    raise UntranslatedError("is neither on nor off")


def _is(value: object, on: bool) -> bool:
    return value is on or str(value).lower() == str(on).lower()


def as_key(key: str, convert: Callable[[object], object] = whole) -> Rule:
    """Return a rule by which a key gets the value of the setting."""
    return lambda value, _: {key: convert(value)}


def choice(key: str, values: Mapping[str, object], otherwise: str = "") -> Rule:
    """Return a rule by which a key gets the value that corresponds to the setting's value."""

    def rule(value: object, _: Theirs) -> Keys:
        found = values.get(str(value).lower())
        if found is None:
            known = either([f'"{name}"' for name in values])
            raise UntranslatedError(otherwise or f"is not what a deck can say (of {known} it can)")
        return {key: found}

    return rule


def when_on(keys: Keys) -> Rule:
    """A switch that sets these keys where it is on."""
    return lambda value, _: keys if switch(value) else {}


def needless(value: object, theirs: Theirs) -> Keys:  # noqa: ARG001
    """Translate a setting that needs no key, since it is always so or does not change results."""
    return {}


def nothing(why: str) -> Rule:
    """Return a rule for a setting that no key can express, with the reason."""

    def rule(value: object, _: Theirs) -> Keys:
        if _is(value, on=False):
            return {}
        raise UntranslatedError(why)

    return rule


def only(expected: Sequence[object], why: str) -> Rule:
    """Return a rule for a setting that needs no key if it has an expected value."""

    def rule(value: object, _: Theirs) -> Keys:
        if value in expected or str(value) in map(str, expected):
            return {}
        raise UntranslatedError(why)

    return rule
