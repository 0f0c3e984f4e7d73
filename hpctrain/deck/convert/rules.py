"""Engine that converts the options of another trainer to deck keys by a table of rules.

A table maps the name of each option to its Rule: the deck keys that the option sets, the conversion of
its value, and what the user is told if no key expresses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from typing import Annotated, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from hpctrain.deck.key_messages import expected_value
from hpctrain.deck.schema import field_of
from hpctrain.deck.sources import clipped
from hpctrain.words import either

_Converted = TypeVar("_Converted")

_MOST_DIGITS = 100
_OPTIMIZER = "optimizer.name"
_UNSET = "is a shell variable that the script does not set, or sets to different values"
_UNKNOWN_ARITHMETIC = "is arithmetic that is not evaluated (only + - * / % of whole numbers are)"


class UnsupportedOptionError(Exception):
    """Error that is raised if no deck key expresses an option. The message completes a sentence about it."""


class SourceOptions:
    """Options of another trainer with their values.

    Args:
        explicit: Options that the user set, by the names of the other trainer. Values are text, numbers,
            booleans, or lists of these.
        defaults: Values that the other trainer uses for options that are not given.
    """

    def __init__(self, explicit: Mapping[str, object], defaults: Mapping[str, object]) -> None:
        self.explicit = dict(explicit)
        self.defaults = {name: value for name, value in defaults.items() if name not in explicit}

    def __contains__(self, name: str) -> bool:
        return name in self.explicit

    def get(self, name: str) -> object:
        """Return the value of an option or its default; None if it has neither."""
        return self.explicit.get(name, self.defaults.get(name))

    def is_on(self, name: str) -> bool:
        """Return True if a flag is set."""
        return _is(self.get(name), on=True)

    def read(self, name: str, convert: Callable[[object], _Converted]) -> _Converted | None:
        """Return the converted value of an option; None if it has no value or cannot be converted."""
        try:
            return convert(self.get(name))
        except UnsupportedOptionError:
            return None


@dataclass(frozen=True)
class Rule:
    """Conversion of one option.

    Attributes:
        keys: Deck keys that the option sets, with "{optimizer}" for the name of the deck's optimizer, whose
            table contains the key. An option without keys needs none, or has no counterpart.
        convert: Function of the option's value and of all options. It returns the value of the key, or a
            tuple with the values of several keys; None stands for a key that is not set. It raises
            UnsupportedOptionError if no key expresses the value.
        condition: Function of all options. The option has no effect in the other trainer if it returns False.
        note: What the user has to do in addition, with "{value}" for the value of the option.
    """

    keys: tuple[str, ...]
    convert: Callable[[object, SourceOptions], object]
    condition: Callable[[SourceOptions], bool] | None = None
    note: str = ""

    def apply(self, value: object, options: SourceOptions) -> dict[str, object]:
        """Return the values of the deck keys that the option sets.

        Raises:
            UnsupportedOptionError: No deck key expresses the value.
        """
        if self.condition is not None and not self.condition(options):
            return {}
        converted = self.convert(value, options)
        values = converted if isinstance(converted, tuple) else (converted,)
        return {key: each for key, each in zip(self.keys, values, strict=False) if each is not None}


@dataclass
class Conversion:
    """Result of a conversion.

    Attributes:
        program: Name of the other trainer.
        keys: Values of deck keys.
        defaults: Those keys whose values are defaults of the other trainer.
        unsupported: Reasons why options are not expressed by keys, or only in part, by option and value.
        unneeded: Options that need no key.
    """

    program: str
    keys: dict[str, object] = field(default_factory=dict)
    defaults: set[str] = field(default_factory=set)
    unsupported: dict[str, str] = field(default_factory=dict)
    unneeded: list[str] = field(default_factory=list)

    def report(self, name: str, value: object, reason: str) -> None:
        """Record why an option is not expressed by keys, or only in part."""
        self.unsupported[name if value is True else f"{name} = {clipped(str(value))}"] = reason


def apply_rules(program: str, options: SourceOptions, rules: Mapping[str, Rule]) -> Conversion:
    """Convert all options of a program, and its defaults for those that are not given.

    Args:
        program: Name of the other trainer.
        options: Its options.
        rules: The rule of each option by name. Options without a rule are reported as unknown.
    """
    result = Conversion(program)
    optimizer = _optimizer_name(options, rules)
    for name, value in (options.explicit | options.defaults).items():
        explicit = name in options
        try:
            if name not in rules:
                raise UnsupportedOptionError(f"is not an option of {program} that hpctrain knows")
            converted_keys = rules[name].apply(value, options)
            keys = {key.format(optimizer=optimizer): each for key, each in converted_keys.items()}
            _require_valid(keys, optimizer)
        except UnsupportedOptionError as error:
            result.report(name, value, str(error) if explicit else f"{error} (this is the default)")
            continue
        if explicit and not keys:
            result.unneeded.append(name)
        if rules[name].note:
            result.report(name, value, rules[name].note.format(value=value))
        for key, converted in keys.items():
            if not explicit and key not in result.keys:  # explicit options come first
                result.defaults.add(key)
            other = result.keys.setdefault(key, converted)
            if other != converted and explicit:
                result.report(name, value, f"would set {key} = {converted}, but another option sets {other}")
    return result


def _optimizer_name(options: SourceOptions, rules: Mapping[str, Rule]) -> str:
    """Return the optimizer of the deck, which is AdamW if no option sets it."""
    for name, rule in rules.items():
        if _OPTIMIZER in rule.keys and options.get(name) is not None:
            with suppress(UnsupportedOptionError):
                return str(rule.apply(options.get(name), options)[_OPTIMIZER])
    return "adamw"


def _require_valid(keys: Mapping[str, object], optimizer: str) -> None:
    """Raise UnsupportedOptionError if an optimizer does not have a key, or a value is outside its bounds."""
    for key, value in keys.items():
        description = field_of(key)
        if description is None:
            raise UnsupportedOptionError(f'has no counterpart with optimizer.name = "{optimizer}"')
        kind: Any = description.annotation
        for constraint in description.metadata:
            kind = Annotated[kind, constraint]
        try:
            TypeAdapter(kind).validate_python(value)
        except ValidationError:
            raise UnsupportedOptionError(
                f"becomes {key}, which must be {expected_value(description)}"
            ) from None


# Conversions of one value. They raise UnsupportedOptionError if the value is of another kind.


def number(value: object) -> float:
    """Return a finite number, given as a number or as text."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            converted = float(value)
        except (ValueError, OverflowError):
            converted = float("nan")
        if isfinite(converted):
            return converted
    raise UnsupportedOptionError(_unknown(value) or "is not a number")


def integer(value: object) -> int:
    """Return an integer of any size, given as a number or as text."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.isdecimal() and len(value) <= _MOST_DIGITS:
        return int(value)  # a float might not hold it
    converted = number(value)
    if converted != int(converted):
        raise UnsupportedOptionError("is not a whole number")
    return int(converted)


def integer_above(limit: int) -> Callable[[object], int | None]:
    """Return a conversion to an integer that sets no key if the integer is at most `limit`."""
    return lambda value: integer(value) if integer(value) > limit else None


def fp32_bytes(value: object) -> int:
    """Return the bytes of a number of fp32 elements."""
    return 4 * integer(value)


def text(value: object) -> str:
    """Return text without shell variables."""
    if not isinstance(value, str) or not value or "$" in value:
        raise UnsupportedOptionError(_unknown(value) or "is not text")
    return value


def switch(value: object) -> bool:
    """Return True or False for a flag."""
    for on in (True, False):
        if _is(value, on):
            return on
    raise UnsupportedOptionError("must be true or false")


def choice(value: object, choices: Mapping[str, object], refusal: str = "") -> object:
    """Return the deck's value for one of the other trainer's, whose names are compared in lower case."""
    name = str(value).lower()
    if name not in choices:
        names = either([f'"{name}"' for name in choices])
        raise UnsupportedOptionError(refusal or f"is not supported (supported: {names})")
    return choices[name]


def _unknown(value: object) -> str:
    """Return why a shell expression has no value here; "" if the value is not an expression."""
    if "$((" in str(value):
        return _UNKNOWN_ARITHMETIC
    return _UNSET if "$" in str(value) else ""


def _is(value: object, on: bool) -> bool:
    return value is on or str(value).lower() == str(on).lower()


# Rules that occur in the tables.

UNNEEDED = Rule((), lambda *_: None)
"""Rule of an option that does not change results, or whose behavior hpctrain always has."""


def sets(
    key: str,
    convert: Callable[[object], object] = integer,
    condition: Callable[[SourceOptions], bool] | None = None,
    note: str = "",
) -> Rule:
    """Return the rule of an option that sets one key to its converted value."""
    return Rule((key,), lambda value, _: convert(value), condition, note)


def chooses(key: str, choices: Mapping[str, object]) -> Rule:
    """Return the rule of an option whose values have counterparts in the deck."""
    return sets(key, lambda value: choice(value, choices))


def flag(key: str, value: object = True) -> Rule:
    """Return the rule of a flag that sets one key to a constant."""
    return sets(key, lambda state: value if switch(state) else None)


def expects(*values: object, refusal: str) -> Rule:
    """Return the rule of an option that needs no key if it has one of some values."""

    def convert(value: object, _: SourceOptions) -> None:
        if value not in values and str(value) not in map(str, values):
            raise UnsupportedOptionError(refusal)

    return Rule((), convert)


def unsupported(reason: str) -> Rule:
    """Return the rule of an option that no key expresses, unless it is switched off."""

    def convert(value: object, _: SourceOptions) -> None:
        if not _is(value, on=False):
            raise UnsupportedOptionError(reason)

    return Rule((), convert)


def each(names: str, rule: Rule, prefix: str = "") -> dict[str, Rule]:
    """Return one rule for several options, whose names are separated by blanks and get a prefix."""
    return {f"{prefix}{name}": rule for name in names.split()}
