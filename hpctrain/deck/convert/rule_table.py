"""Engine that converts the options of another trainer to deck keys by a table of rules.

A table is a TOML file with a row for each option: the deck keys that it sets, the conversion of its value,
and what the user is told if no key expresses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from hpctrain.deck.convert.option_values import (
    CONVERSIONS,
    UnsupportedOptionError,
    choice,
    is_switched,
    switch,
)
from hpctrain.deck.key_messages import expected_value
from hpctrain.deck.schema import field_of
from hpctrain.deck.sources import clipped
from hpctrain.deck.toml import read_data_file

_Converted = TypeVar("_Converted")

_OPTIMIZER = "optimizer.name"


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
        return is_switched(self.get(name), on=True)

    def read(self, name: str, convert: Callable[[object], _Converted]) -> _Converted | None:
        """Return the converted value of an option; None if it has no value or cannot be converted."""
        try:
            return convert(self.get(name))
        except UnsupportedOptionError:
            return None


OptionConversion = Callable[[object, SourceOptions], object]
"""Function of the value of an option and of all options."""


@dataclass(frozen=True)
class Condition:
    """Condition on the values of options.

    Attributes:
        required: Values of options that must all be there: a value, or a list of values of which one is.
            They are compared in lower case. "*" stands for any value, and "" for an option that has none.
        excluded: Values of which none may be there, in the same form.
    """

    required: Mapping[str, object] = field(default_factory=dict)
    excluded: Mapping[str, object] = field(default_factory=dict)

    def holds(self, options: SourceOptions) -> bool:
        """Return True if the condition holds for the given options and the defaults of the others."""

        def has(name: str, expected: object) -> bool:
            own = options.get(name)
            texts = [str(each).lower() for each in (expected if isinstance(expected, list) else [expected])]
            return (own is not None and "*" in texts) or str("" if own is None else own).lower() in texts

        return all(has(*each) for each in self.required.items()) and not any(
            has(*each) for each in self.excluded.items()
        )


@dataclass(frozen=True)
class Rule:
    """Conversion of one option.

    Attributes:
        keys: Deck keys that the option sets, with "{optimizer}" for the name of the deck's optimizer, whose
            table contains the key. An option without keys needs none, or has no counterpart.
        convert: Function of the option's value and of all options. It returns the value of all keys, or a
            tuple or list with the value of each; None stands for a key that is not set. It raises
            UnsupportedOptionError if no key expresses the value.
        condition: Condition under which the option has an effect in the other trainer.
        note: What the user has to do in addition, with "{value}" for the value of the option.
    """

    keys: tuple[str, ...]
    convert: OptionConversion
    condition: Condition = field(default_factory=Condition)
    note: str = ""

    def apply(self, value: object, options: SourceOptions) -> dict[str, object]:
        """Return the values of the deck keys that the option sets.

        Raises:
            UnsupportedOptionError: No deck key expresses the value.
        """
        if not self.condition.holds(options):
            return {}
        converted = self.convert(value, options)
        values = converted if isinstance(converted, tuple | list) else [converted] * len(self.keys)
        return {key: each for key, each in zip(self.keys, values, strict=True) if each is not None}


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


def apply_rules(options: SourceOptions, table: RuleTable) -> Conversion:
    """Convert all options of a program, and its defaults for those that are not given.

    Args:
        options: Options of the program.
        table: Its rules. Options without a rule are reported as unknown.
    """
    result, rules = Conversion(table.program), table.rules
    optimizer = _optimizer_name(options, rules)
    for name, value in (options.explicit | options.defaults).items():
        explicit = name in options
        try:
            if name not in rules:
                raise UnsupportedOptionError(f"is not an option of {table.program} that hpctrain knows")
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


@dataclass(frozen=True)
class RuleTable:
    """Content of a table of rules.

    Attributes:
        program: Name of the other trainer.
        rules: Rule of each option by name.
        conditional_defaults: Defaults of the other trainer by option, each group with its condition.
        tables: Names of tables whose settings are not converted.
    """

    program: str
    rules: Mapping[str, Rule]
    conditional_defaults: Sequence[tuple[Condition, Mapping[str, object]]]
    tables: frozenset[str]

    def defaults(self, explicit: Mapping[str, object]) -> dict[str, object]:
        """Return the values that the other trainer uses for options beside those that the user set."""
        options, defaults = SourceOptions(explicit, {}), dict[str, object]()
        for condition, values in self.conditional_defaults:
            if condition.holds(options):
                defaults |= values
        return defaults


def load_table(name: str, program: str, functions: Mapping[str, Callable[..., Any]]) -> RuleTable:
    """Load the rules in a TOML file of this package; README.md explains its rows.

    Args:
        name: Name of the file.
        program: Name of the other trainer.
        functions: Conversions that rows name, with an underscore before their names. They take the value of
            the option and all options.
    """
    content = read_data_file(f"convert/{name}")
    rules = {option: _rule(row, functions) for option, row in content["options"].items()}
    tables = content.get("tables", {})
    refused = [
        *tables.items(),
        *((group["options"], group["reason"]) for group in content.get("unsupported", [])),
    ]
    for options, reason in refused:
        rules |= dict.fromkeys(options.split(), Rule((), partial(_refuse, reason=reason)))
    rules |= dict.fromkeys(content["unneeded"]["options"].split(), Rule((), lambda *_: None))
    defaults = [(_condition(group), group["values"]) for group in content["defaults"]]
    return RuleTable(program, rules, defaults, frozenset(tables))


def _rule(row: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> Rule:
    """Return the rule that a row of the table `options` describes."""
    keys = row.get("keys") or ([row["key"]] if "key" in row else [])
    return Rule(tuple(keys), _conversion(row, functions), _condition(row), row.get("note", ""))


def _condition(row: Mapping[str, Any]) -> Condition:
    return Condition(row.get("if", {}), row.get("unless", {}))


def _conversion(row: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> OptionConversion:
    match row:
        case {"unsupported": reason}:
            return partial(_refuse, reason=reason)
        case {"expects": values, "refusal": refusal}:
            return partial(_expect, values=values, refusal=refusal)
        case {"choices": choices}:
            return lambda value, _: choice(value, choices)
        case {"value": constant}:
            return lambda value, _: constant if switch(value) else None
        case {"always": constant}:
            return lambda *_: constant
        case _:
            name = row.get("as") or row.get("check") or "integer"
            simple = CONVERSIONS.get(name)
            return functions[f"_{name}"] if simple is None else lambda value, _: simple(value)


def _refuse(value: object, _: SourceOptions, reason: str) -> None:
    """Raise UnsupportedOptionError unless an option is switched off."""
    if not is_switched(value, on=False):
        raise UnsupportedOptionError(reason)


def _expect(value: object, _: SourceOptions, values: Sequence[object], refusal: str) -> None:
    """Raise UnsupportedOptionError unless an option has one of some values."""
    if value not in values and str(value) not in map(str, values):
        raise UnsupportedOptionError(refusal)
