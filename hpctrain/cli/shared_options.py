"""Command-line options and types of arguments that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

PATH = click.Path(path_type=Path)


def set_option(example: str = "layout.tensor=2", key: str = "a deck key") -> Callable[[Command], Command]:
    """Return the repeatable option `--set KEY=VALUE`, which a command gets as `overrides`.

    Args:
        example: Example in the help.
        key: Words for the key in the help.
    """
    help_text = f"Override {key}, e.g. {example}."
    return click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help=help_text)
