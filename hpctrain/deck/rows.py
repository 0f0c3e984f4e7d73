"""Problems, with their places, of keys that hold a list of tables, such as [[evaluation]]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from hpctrain.deck.key import Section
from hpctrain.deck.key_messages import expected_value, row_section, value_hint
from hpctrain.deck.problem import DeckProblem
from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import Place, Sources, clipped, toml_value
from hpctrain.text import nearest


def row_problems(key: str, field: FieldInfo, value: object, sources: Sources) -> Iterator[tuple[Place, str]]:
    """Yield place and message of each problem in the list of tables that a key holds.

    Unknown, missing and wrong keys of the tables are problems. Items that are not tables are skipped. Nothing
    is yielded for keys that hold something else, and for a value that is not a list.

    Args:
        key: Full name of the key, such as "evaluation.sets".
        field: Its field.
        value: Its value as the deck has it, before validation.
        sources: Places of the deck's keys.
    """
    row = row_section(field)
    if row is None or not isinstance(value, list):
        return
    for number, table in enumerate(value):
        if isinstance(table, dict):
            for name, sentence in _wrong_keys(row, table):
                place = _place_of_row(sources, key, number, name)
                if name in table:
                    yield place, _message(place, key, name, table[name], sentence)
                else:
                    section = key.partition(".")[0]
                    missing = f"{section}.{name} is missing in table {number + 1}"
                    yield place, f"{place.prefix}: {missing}: {sentence}"


def place_and_message(deck: Deck, problem: DeckProblem) -> tuple[Place, str]:
    """Return the place of a problem, by which problems are sorted, and its whole message.

    The message is of the form `deck.toml:14: layout.tensor = 3: must divide ...`.
    """
    if problem.row is None:
        return deck.sources.place(problem.key), deck.problem(problem.key, problem.sentence)
    return (
        _place_of_row(deck.sources, problem.key, *problem.row),
        row_message(deck, problem.key, *problem.row, problem.sentence),
    )


def row_message(deck: Deck, key: str, number: int, name: str, sentence: str) -> str:
    """Return a message about a key in a list of tables: `deck.toml:9: evaluation.tokens = "a.h5": ...`.

    The message names the table by its section, as the deck has it: [[evaluation]] for "evaluation.sets".

    Args:
        deck: The deck.
        key: Full name of the key that holds the list, such as "evaluation.sets".
        number: Index of the table in the list, counted from 0.
        name: Name of the key in that table, which is also the attribute of its class.
        sentence: End of the message after the key and its value.

    Raises:
        IndexError: The list has no such table.
        AttributeError: The table has no such key.
    """
    value = getattr(deck.value(key)[number], name)  # type: ignore[index]
    return _message(_place_of_row(deck.sources, key, number, name), key, name, value, sentence)


def _place_of_row(sources: Sources, key: str, number: int, name: str) -> Place:
    """Return the place of key `name` in table `number` of a list; if unknown, of the table or the list."""
    row = f"{key.partition('.')[0]}.{number}"
    return next(
        (sources.places[each] for each in (f"{row}.{name}", row) if each in sources.places),
        sources.place(key),
    )


def _wrong_keys(row: type[Section], table: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each wrong or missing key of a table with the end of a sentence about it."""
    faults: dict[str, str] = {}
    try:
        row.model_validate(table)
    except ValidationError as error:
        faults = {str(fault["loc"][0]): fault["type"] for fault in error.errors()}
    for name, kind in faults.items():
        if kind == "extra_forbidden":
            near = nearest(name, row.model_fields)
            hint = f"did you mean {near}?" if near else f"it has {', '.join(row.model_fields)}"
            yield name, f"unknown key ({hint})"
        elif kind == "missing":
            yield name, expected_value(row.model_fields[name])
        else:
            field = row.model_fields[name]
            yield name, f"must be {expected_value(field)}{value_hint(table[name], field)}"


def _message(place: Place, key: str, name: str, value: object, sentence: str) -> str:
    shown = f"{key.partition('.')[0]}.{clipped(name)} = {clipped(toml_value(value))}"
    return f"{place.prefix}: {shown}: {sentence}"
