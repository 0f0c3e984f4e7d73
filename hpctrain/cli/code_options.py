"""Options of verbs that call code which a stored deck names: `--trust-code` and `--trust-deck`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hpctrain.comm.world import World
    from hpctrain.deck.code import CodeTrust, Overrides

ReadTrust = Callable[[], "CodeTrust"]
"""Reads what the options say; errors as for `read_code_names` if --trust-deck names no readable deck."""


def code_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a click command, which gets what they say as its argument `trust`, a `ReadTrust`."""

    @click.option(
        "--trust-code",
        is_flag=True,
        help="Run the code that the stored deck names (its modules, datasets, losses and rewards).",
    )
    @click.option(
        "--trust-deck",
        metavar="DECK",
        type=click.Path(path_type=Path),
        help="Run such code where this deck of your own names it, too.",
    )
    @wraps(command)
    def with_options(*args: Any, trust_code: bool, trust_deck: Path | None, **options: Any) -> Any:
        def read() -> CodeTrust:
            from hpctrain.deck.code import CodeTrust
            from hpctrain.deck.read import read_code_names

            names = frozenset() if trust_deck is None else read_code_names(trust_deck)
            return CodeTrust(trust_code, names)

        return command(*args, trust=read, **options)

    return with_options


def with_trust(world: World, overrides: Iterable[str], trust: ReadTrust) -> Overrides:
    """Return the `--set` arguments of a command with what its options say of code. Collective."""
    from hpctrain.deck.code import Overrides

    return Overrides.of(overrides, agreed_trust(world, trust))


def agreed_trust(world: World, trust: ReadTrust) -> CodeTrust:
    """Return what the options say of code; errors are raised on all ranks. Collective."""
    with world.agreement():
        return trust()
