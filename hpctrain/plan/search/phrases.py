"""Sentences about layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.deck.sources import toml_value
from hpctrain.units import format_bytes, format_seconds


def assignments(values: Mapping[str, object]) -> str:
    """Keys and their values, but for those that have none."""
    return ", ".join(f"{key} = {toml_value(value)}" for key, value in values.items() if value is not None)


def arguments(values: Mapping[str, object]) -> list[str]:
    """The `--set` arguments that make a layout of its deck."""
    return [
        word for key, value in values.items() if value is not None for word in ("--set", _set(key, value))
    ]


def _set(key: str, value: object) -> str:
    return f"{key}={value}" if isinstance(value, str) else f"{key}={toml_value(value)}"


def choice(values: Mapping[str, object], seconds: float, machine: str) -> str:
    """What was chosen for a run."""
    return (
        f"the quickest layout that fits, a step in {format_seconds(seconds)} by the rates of {machine}: "
        f"{assignments(values)}"
    )


def nothing_fits(values: Mapping[str, object], room: str, lacking: float, more: Sequence[int]) -> str:
    """Why no layout fits: the one whose nodes need least, what lacks, and ranks on which one would fit."""
    would = f"; {more[0]} ranks would do" if more else ""
    return (
        f"no layout fits into memory: that which needs least lacks {format_bytes(lacking)} "
        f"({assignments(values)}): {room}{would}"
    )
