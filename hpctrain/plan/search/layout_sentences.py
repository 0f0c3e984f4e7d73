"""Sentences about layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import toml_value
from hpctrain.units import format_bytes, format_seconds


def changed(deck: Deck, values: Mapping[str, object]) -> dict[str, object]:
    """Return the values that differ from those of a deck."""
    return {key: value for key, value in values.items() if value != deck.value(key)}


def assignments(values: Mapping[str, object]) -> str:
    """Return keys and values as text, without those that are None."""
    return ", ".join(f"{key} = {toml_value(value)}" for key, value in values.items() if value is not None)


def arguments(values: Mapping[str, object]) -> list[str]:
    """Return the `--set` arguments that give a deck a layout."""
    return [
        word for key, value in values.items() if value is not None for word in ("--set", _set(key, value))
    ]


def _set(key: str, value: object) -> str:
    return f"{key}={value}" if isinstance(value, str) else f"{key}={toml_value(value)}"


def choice(values: Mapping[str, object], seconds: float, machine: str) -> str:
    """Return a sentence about the layout that was chosen for a run."""
    return (
        f"the fastest layout that fits, predicted step time {format_seconds(seconds)} on {machine}: "
        f"{assignments(values) or 'all defaults'}"
    )


def nothing_fits(values: Mapping[str, object], demand: str, lacking: float, more: Sequence[int]) -> str:
    """Return why no layout fits.

    Args:
        values: Layout whose nodes need least.
        demand: Description of what a node needs and has.
        lacking: Bytes that the node lacks.
        more: Larger numbers of ranks on which a layout fits.
    """
    would = f"; it fits on {more[0]} ranks" if more else ""
    return (
        f"no layout fits into memory: the smallest one lacks {format_bytes(lacking)} "
        f"({assignments(values)}): {demand}{would}"
    )
