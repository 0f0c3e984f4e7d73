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


def wrong_rows(key: str, field: FieldInfo, value: object, sources: Sources) -> Iterator[tuple[Place, str]]:
    """Yield place and message of each problem in the list of tables of a key; nothing for other keys."""
    row = row_section(field)
    if row is None or not isinstance(value, list):
        return
    for number, table in enumerate(value):
        if isinstance(table, dict):
            yield from _wrong_keys(key, number, row, table, sources)


def located(deck: Deck, problem: DeckProblem) -> tuple[Place, str]:
    """Return the place of a problem and its message."""
    if problem.row is None:
        return deck.sources.place(problem.key), deck.problem(problem.key, problem.sentence)
    return (
        place_of_row(deck.sources, problem.key, *problem.row),
        row_problem(deck, problem.key, *problem.row, problem.sentence),
    )


def row_problem(deck: Deck, key: str, number: int, name: str, sentence: str) -> str:
    """Return the message about key `name` in table `number`, counted from 0, of a list of tables."""
    value = getattr(deck.value(key)[number], name)  # type: ignore[index]
    place = place_of_row(deck.sources, key, number, name)
    return _said(place, key.partition(".")[0], name, value, sentence)


def place_of_row(sources: Sources, key: str, number: int | None, name: str) -> Place:
    """Return the place of key `name` in table `number` of a list; if unknown, of the table or the list."""
    section = key.partition(".")[0]
    names = (
        (f"{section}.{number}.{name}", f"{section}.{number}") if number is not None else (f"{key}.{name}",)
    )
    return next((sources.places[each] for each in names if each in sources.places), sources.place(key))


def _wrong_keys(
    key: str, number: int | None, row: type[Section], table: dict[str, Any], sources: Sources
) -> Iterator[tuple[Place, str]]:
    try:
        row.model_validate(table)
    except ValidationError as error:
        faults = {str(fault["loc"][0]): fault["type"] for fault in error.errors()}
    else:
        return
    shown = key if number is None else key.partition(".")[0]
    for name, kind in faults.items():
        place = place_of_row(sources, key, number, name)
        if kind == "extra_forbidden":
            near = nearest(name, row.model_fields)
            hint = f"did you mean {near}?" if near else f"it has {', '.join(row.model_fields)}"
            yield place, _said(place, shown, name, table[name], f"unknown key ({hint})")
        elif kind == "missing":
            of_row = "" if number is None else f" in table {number + 1}"
            yield (
                place,
                f"{place.prefix}: {shown}.{name} is missing{of_row}: "
                f"{expected_value(row.model_fields[name])}",
            )
        else:
            field = row.model_fields[name]
            sentence = f"must be {expected_value(field)}{value_hint(table[name], field)}"
            yield place, _said(place, shown, name, table[name], sentence)


def _said(place: Place, table: str, name: str, value: object, sentence: str) -> str:
    shown = f"{table}.{clipped(name)} = {clipped(toml_value(value))}"
    return f"{place.prefix}: {shown}: {sentence}"
