"""Calls of `prepare_text` and `prepare_rows` with the options as keyword arguments, and no output."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.comm.world import World
from hpctrain.data.prepare_options import PreparationResult, RowOptions, Say, TextOptions
from hpctrain.data.prepare_rows import prepare_rows as rows_with
from hpctrain.data.prepare_text import prepare_text
from hpctrain.data.token_writer import Report


def ignore(*_: object) -> None:
    """Print nothing."""


def prepare(
    world: World, out: Path, paths: Sequence[str], say: Say = ignore, report: Report = ignore, **options: Any
) -> PreparationResult:
    """Make a token file of text."""
    return prepare_text(world, out, paths, TextOptions(**options), say, report)


def prepare_rows(
    world: World, out: Path, paths: Sequence[str], say: Say = ignore, report: Report = ignore, **options: Any
) -> PreparationResult:
    """Make a token file of rows."""
    return rows_with(world, out, paths, RowOptions(**options), say, report)
