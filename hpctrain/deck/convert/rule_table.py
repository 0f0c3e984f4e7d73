"""Engine that converts the options of another trainer to deck keys by a table of rules.

A table is a TOML file with a row for each option: the deck keys that it sets, the conversion of its value,
and the message to the user if no key expresses it. An example:
`"--seq-length" = { key = "batch.sequence" }`.

| entries of a row | meaning |
|---|---|
| `key`, `keys` | Deck keys that the option sets, all to one value or each to its own. |
| `as` | Conversion of the value, `integer` if it is left out. |
| `choices` | Values of the option with their counterparts, which are lists if there are several keys. |
| `value` | Value of the key if the option, a flag, is set. |
| `always` | Value of the key, whatever the option's value is. |
| `check` | Function that only raises an error, for an option without a key. |
| `expects`, `refusal` | Values that need no key, and what is reported for other values. |
| `unsupported` | What is reported for any value except false. |
| `if`, `unless` | Values of other options with which the row holds, or not; "*" is any value, "" is none. |
| `note` | What the user has to do in addition. |

`{optimizer}` in a key stands for the table of the deck's optimizer. `as` and `check` name functions of
`option_values`, or of `deepspeed` and `megatron`, where their names begin with an underscore and they may
depend on other options. They raise UnsupportedOptionError with the end of a sentence about the option.
Sections list options that need no key (`unneeded`), options that share a reason (`unsupported`), and defaults
of the trainer, which may have conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from hpctrain.deck.convert.option_values import (
    CONVERSIONS,
    UnsupportedOptionError,
    choice,
    integer,
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

    `name in options` is True if the user set the option; defaults do not count.

    Args:
        explicit: Options that the user set, by the names of the other trainer. Values are text, numbers,
            booleans, or lists of these.
        defaults: Values that the other trainer uses for options that are not given. Those of options that the
            user set are ignored.
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
        """Return True if the value of a flag, or its default, is True or the text "true" in any case."""
        return is_switched(self.get(name), on=True)

    def read(self, name: str, convert: Callable[[object], _Converted]) -> _Converted | None:
        """Return the converted value of an option or of its default; None if it cannot be converted.

        The result is None, too, if the option has neither a value nor a default.

        Args:
            name: Name of the option.
            convert: Conversion that raises UnsupportedOptionError for a wrong value, and for None.
        """
        try:
            return convert(self.get(name))
        except UnsupportedOptionError:
            return None


def _holds(row: Mapping[str, Any], options: SourceOptions) -> bool:
    """Return True if the condition of a row holds: the values of options in its entries `if` and `unless`.

    Values are compared in lower case. A list has several, "*" is any value, and "" no value.
    """

    def has(name: str, expected: object) -> bool:
        own = options.get(name)
        texts = [str(each).lower() for each in (expected if isinstance(expected, list) else [expected])]
        return (own is not None and "*" in texts) or str("" if own is None else own).lower() in texts

    required, excluded = row.get("if", {}), row.get("unless", {})
    return all(has(*each) for each in required.items()) and not any(has(*each) for each in excluded.items())


@dataclass(frozen=True)
class Rule:
    """Conversion of one option to deck keys, by a row of a table of rules.

    Attributes:
        row: Row of the table, whose entries the module explains.
        functions: Functions that the entries `as` and `check` name, with an underscore before their names.
    """

    row: Mapping[str, Any]
    functions: Mapping[str, Callable[[object, SourceOptions], object]]

    @property
    def keys(self) -> tuple[str, ...]:
        """Full names of the deck keys that the option sets; empty if it sets none.

        A name may have "{optimizer}" in place of the name of the deck's optimizer.
        """
        return tuple(self.row.get("keys") or ([self.row["key"]] if "key" in self.row else []))

    def apply(self, value: object, options: SourceOptions) -> dict[str, object]:
        """Return the values of the deck keys that the option sets, by the names that the property `keys` has.

        These are full names in which "{optimizer}" is not replaced yet. Keys that the value does not set are
        left out. The result is empty if the option needs no key, or if the condition of the row (its entries
        `if` and `unless`) does not hold. The values are not checked against the schema of the deck.

        Args:
            value: Value of the option, given by the user or by default.
            options: All options, on which the condition and the conversion may depend.

        Raises:
            UnsupportedOptionError: No deck key expresses the value.
        """
        converted = self._converted(value, options) if _holds(self.row, options) else None
        values = converted if isinstance(converted, tuple | list) else [converted] * len(self.keys)
        return {key: each for key, each in zip(self.keys, values, strict=True) if each is not None}

    def _converted(self, value: object, options: SourceOptions) -> object:
        """Return the value of all keys, or a value for each; None stands for a key that is not set."""
        match self.row:
            case {"unsupported": reason}:
                if not is_switched(value, on=False):
                    raise UnsupportedOptionError(reason)
            case {"expects": values, "refusal": refusal}:
                if value not in values and str(value) not in map(str, values):
                    raise UnsupportedOptionError(refusal)
            case {"choices": choices}:
                return choice(value, choices)
            case {"value": constant}:
                return constant if switch(value) else None
            case {"always": constant}:
                return constant
            case {"as": name} | {"check": name}:
                simple = CONVERSIONS.get(name)
                return self.functions[f"_{name}"](value, options) if simple is None else simple(value)
            case {"key": _} | {"keys": _}:
                return integer(value)
        return None


@dataclass
class Conversion:
    """Result of a conversion: deck keys by full name, and the options that these keys do not express.

    Attributes:
        program: Name of the other trainer.
        keys: Values of deck keys by full name, such as "optimizer.adamw.beta1".
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
        """Record in `unsupported` why an option is not expressed by keys, or only in part.

        Args:
            name: Name of the option.
            value: Its value, which is shown after the name; True for a flag, of which only the name is shown.
            reason: End of a sentence about the option. It replaces an earlier reason for the same value.
        """
        self.unsupported[name if value is True else f"{name} = {clipped(str(value))}"] = reason


def apply_rules(options: SourceOptions, table: RuleTable) -> Conversion:
    """Convert all options of a program, and its defaults for those that are not given. Local.

    What cannot be converted raises no error: the Conversion lists it in `unsupported`, with a reason. So are
    values that the deck key does not allow. If two options set the same key, the first keeps it, and explicit
    options come before defaults. If both are explicit and their values differ, the second is listed in
    `unsupported`.

    Args:
        options: Options of the program; they are not changed.
        table: Its rules. An option without a rule is reported as unknown.
    """
    result, rules = Conversion(table.program), table.rules
    optimizer = _optimizer_name(options, rules)
    for name, value in (options.explicit | options.defaults).items():
        explicit = name in options
        try:
            if name not in rules:
                raise UnsupportedOptionError(f"is an unknown option of {table.program}")
            converted_keys = rules[name].apply(value, options)
            keys = {key.format(optimizer=optimizer): each for key, each in converted_keys.items()}
            _require_valid(keys, optimizer)
        except UnsupportedOptionError as error:
            result.report(name, value, str(error) if explicit else f"{error} (this is the default)")
            continue
        if explicit and not keys:
            result.unneeded.append(name)
        if note := rules[name].row.get("note"):
            result.report(name, value, note.format(value=value))
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
        defaults: Groups of defaults of the other trainer, with `values` by option and a condition.
        tables: Names of tables whose settings are not converted.
    """

    program: str
    rules: Mapping[str, Rule]
    defaults: Sequence[Mapping[str, Any]]
    tables: frozenset[str]

    def applicable_defaults(self, explicit: Mapping[str, object]) -> dict[str, object]:
        """Return the defaults of the other trainer by option, from all groups whose condition holds.

        If several of these groups have an option, the last one counts. The result may contain options that
        the user set, which `SourceOptions` then ignores.

        Args:
            explicit: Options that the user set, on which the conditions depend.
        """
        options = SourceOptions(explicit, {})
        groups = [group["values"] for group in self.defaults if _holds(group, options)]
        return {name: value for values in groups for name, value in values.items()}


def load_table(name: str, program: str, functions: Mapping[str, Any]) -> RuleTable:
    """Return the rules in a TOML file of this package, whose rows the module explains.

    Args:
        name: Name of the file, such as "megatron.toml".
        program: Name of the other trainer, as messages call it.
        functions: Functions by name, such as the globals of a module. Rows name them without the underscore
            with which their names begin.
    """
    content = read_data_file(f"convert/{name}")
    tables = content.get("tables", {})
    rows = content["options"] | {option: {"unsupported": reason} for option, reason in tables.items()}
    for group in content.get("unsupported", []):
        rows |= {option: {"unsupported": group["reason"]} for option in group["options"].split()}
    rows |= {option: {} for option in content["unneeded"]["options"].split()}
    rules = {option: Rule(row, functions) for option, row in rows.items()}
    return RuleTable(program, rules, content["defaults"], frozenset(tables))
