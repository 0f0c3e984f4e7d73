"""Arguments of `--sweep`: a key of the deck, or `ranks`, and its values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from pydantic import ValidationError, create_model

from hpctrain.deck.key import Section, key_name
from hpctrain.deck.key_messages import expected_value, unknown_key, unknown_section, value_hint, value_type
from hpctrain.deck.reading.old_keys import current_field
from hpctrain.deck.schema import sections, tables
from hpctrain.deck.sources import clipped
from hpctrain.deck.toml import TomlError, parse_argument
from hpctrain.errors import HpctrainError

RANKS = "ranks"
MOST_RANKS = 1 << 20
MOST_POINTS = 1000
_CLOSING = {"[": "]", "{": "}"}


@dataclass(frozen=True)
class SweptKey:
    """Key of the deck, or `ranks`, and its values in the syntax of `--set`."""

    key: str
    values: tuple[str, ...]

    @property
    def short(self) -> str:
        """Name of the key without its section."""
        return self.key.rpartition(".")[2]


Changes = tuple[tuple[str, str], ...]
"""Keys and values of a point, in the order of the `--sweep` arguments."""


def parse_sweeps(arguments: Sequence[str]) -> tuple[SweptKey, ...]:
    """Return the keys and values of all `--sweep` arguments.

    Raises:
        HpctrainError: Arguments are wrong. It has the problems of all of them.
    """
    problems = list[str]()
    sweeps = list[SweptKey]()
    for argument in arguments:
        try:
            swept = parse_sweep(argument)
        except HpctrainError as error:
            problems += error.problems
            continue
        if swept.key in [each.key for each in sweeps]:
            problems.append(
                f"--sweep {clipped(argument)}: {swept.key} is swept twice; give all values at once"
            )
        sweeps.append(swept)
    count = prod(len(each.values) for each in sweeps)
    if count > MOST_POINTS and not problems:
        sizes = " x ".join(str(len(each.values)) for each in sweeps)
        problems.append(f"--sweep: {sizes} = {count} points are more than {MOST_POINTS}: give fewer values")
    if problems:
        raise HpctrainError(problems)
    return tuple(sweeps)


def parse_sweep(argument: str) -> SweptKey:
    """Return the key and the values of one `key=value,value,...`.

    Commas in brackets and quotes belong to values.
    """
    where = f"--sweep {clipped(argument)}"
    name, equals, text = argument.partition("=")
    section, dot, own = name.strip().partition(".")
    if not equals or not section or (dot and not own):
        raise HpctrainError(f"{where}: must be written as section.key=value,value,..., or ranks=64,128")
    if not dot and section != RANKS:
        hint = (
            f"must be written as {section}.key=value,..."
            if section in sections()
            else unknown_key("", section)
        )
        raise HpctrainError(f"{where}: {hint}")
    if dot:
        if section not in sections():
            raise HpctrainError(f"{where}: {unknown_section(section, [own])}")
        if current_field(f"{section}.{own}") is None:
            table = f"{section}.{own}".rpartition(".")[0]
            raise HpctrainError(f"{where}: {unknown_key(table if table in tables() else section, own)}")
    try:
        values = tuple(value.strip() for value in _values(text))
    except ValueError as error:
        raise HpctrainError(f"{where}: {error}") from None
    if not all(values):
        which = "no values" if not "".join(values) else "a value that is empty"
        raise HpctrainError(f"{where}: has {which}: write them with commas between them")
    repeated = next((value for value in values if values.count(value) > 1), None)
    problems = [f"{where}: {clipped(repeated)} is given twice"] if repeated is not None else []
    for value in dict.fromkeys(values):
        problem = _ranks_problem(value) if not dot else _value_problem(f"{section}.{own}", value)
        problems += [f"{where}: {clipped(value)}: {problem}"] if problem else []
    if problems:
        raise HpctrainError(problems)
    return SweptKey(f"{section}.{own}" if dot else RANKS, values)


def points(sweeps: Sequence[SweptKey]) -> Iterator[Changes]:
    """Yield all combinations of values. The values of the last key change first."""
    for values in product(*(each.values for each in sweeps)):
        yield tuple((each.key, value) for each, value in zip(sweeps, values, strict=True))


def _values(text: str) -> Iterator[str]:
    """Yield the parts of a text between commas that are outside of brackets and quotes."""
    open_brackets, quote, begin, escaped = list[str](), "", 0, False
    for position, character in enumerate(text):
        if quote:
            closes = character == quote and not escaped
            escaped = character == "\\" and quote == '"' and not escaped
            quote = "" if closes else quote
        elif character in "\"'" and text[begin:position].rstrip()[-1:] in {"", "[", ",", "{", "="}:
            quote = character
        elif character in _CLOSING:
            open_brackets.append(_CLOSING[character])
        elif open_brackets and character == open_brackets[-1]:
            open_brackets.pop()
        elif character == "," and not open_brackets:
            yield text[begin:position]
            begin = position + 1
    if quote or open_brackets:
        raise ValueError("a quote is not closed" if quote else f"a {open_brackets[-1]} is missing")
    yield text[begin:]


def _ranks_problem(value: str) -> str:
    if value.isdecimal() and value.isascii() and len(value) < 10 and 1 <= int(value) <= MOST_RANKS:
        return ""
    return f"must be a whole number from 1 to {MOST_RANKS}"


def _value_problem(key: str, text: str) -> str:
    """Return why no deck can have this value of a key; "" if some deck can."""
    field = current_field(key)
    assert field is not None
    try:
        value = parse_argument(text)
    except TomlError as error:
        return error.reason
    if value_type(field) is str and not isinstance(value, str):
        value = text
    of_value: Any = field.annotation, deepcopy(field)
    model = create_model("Value", __base__=Section, value=of_value)
    try:
        model.model_validate({key_name("value", field): value})
    except ValidationError:
        return f"must be {expected_value(field)}{value_hint(value, field)}"
    return ""
