"""Command-line options `--trust-code` and `--trust-deck`, which allow code that a stored deck names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.shared_options import PATH

if TYPE_CHECKING:
    from hpctrain.comm.world import World
    from hpctrain.deck.code import CodeTrust, Overrides

ReadTrust = Callable[[], "CodeTrust"]
"""Function that evaluates both options. It raises the errors of `read_code_entries` for --trust-deck."""


def code_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add both options to a click command. The command gets their values as a `ReadTrust` named `trust`."""

    @click.option(
        "--trust-code",
        is_flag=True,
        help="Run any code that the stored deck names (modules, datasets, losses and rewards).",
    )
    @click.option(
        "--trust-deck",
        metavar="DECK",
        type=PATH,
        help="Run only code that a deck of your own, DECK, names under the same keys.",
    )
    @wraps(command)
    def with_options(*args: Any, trust_code: bool, trust_deck: Path | None, **options: Any) -> Any:
        def read() -> CodeTrust:
            from hpctrain.deck.code import CodeTrust
            from hpctrain.deck.read import read_code_entries

            entries = frozenset() if trust_deck is None else read_code_entries(trust_deck)
            return CodeTrust(trust_code, entries)

        return command(*args, trust=read, **options)

    return with_options


def add_trust(world: World, overrides: Iterable[str], trust: ReadTrust) -> Overrides:
    """Return the `--set` arguments together with the values of the trust options. Collective."""
    from hpctrain.deck.code import Overrides

    return Overrides.of(overrides, read_trust(world, trust))


def read_trust(world: World, trust: ReadTrust) -> CodeTrust:
    """Evaluate the trust options; errors are raised on all ranks. Collective."""
    with world.agreement():
        return trust()
