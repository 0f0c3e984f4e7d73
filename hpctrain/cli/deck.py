"""`hpctrain deck`: the resolved deck, or the reference of all keys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck


@click.command(name="deck")
@click.argument("deck", metavar="DECK|SECTION", required=False)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key, as layout.tensor=2.")
@click.option(
    "--ranks", type=click.IntRange(1, 1 << 20), metavar="N", help="Check the deck against N ranks too."
)
@click.option("--reference", is_flag=True, help="Print all keys, or those of SECTION, with type and default.")
@click.option(
    "--from",
    "foreign",
    metavar="FILE",
    help="Print a deck from DeepSpeed's configuration, or from Megatron-LM's arguments.",
)
def command(
    deck: str | None, overrides: tuple[str, ...], ranks: int | None, reference: bool, foreign: str | None
) -> None:
    """Print the deck in file DECK with every default filled in, or say all that is wrong with it.

    What it names is looked into too; a token file that is not there may still be made. With --ranks, a layout
    that it leaves open (layout = "auto") is chosen.

    With --from, ds_config.json, or a file or script with Megatron-LM's arguments, becomes a deck that tells
    what could not be said in it, and what is still to be given.

    Under mpirun or srun it is checked against the ranks that were started, and rank 0 alone prints.
    """
    from hpctrain.deck.read import deck_text, read_deck
    from hpctrain.deck.reference import reference_text
    from hpctrain.host.launcher import launched_rank, launched_size
    from hpctrain.plan.named import named_problems

    size = launched_size(os.environ)
    if ranks is None and size > 1:
        ranks = size
    if foreign is not None:
        from hpctrain.deck.convert.deck_text import foreign_deck

        if deck is not None or overrides or reference:
            raise click.UsageError("--from makes a deck by itself: leave out DECK, --set and --reference")
        text = foreign_deck(foreign)
    elif reference:
        from hpctrain.report.terminal import columns

        width = columns()
        text = reference_text(deck) if width is None else reference_text(deck, width)
    elif deck is None:
        raise click.UsageError("give a DECK, --from or --reference")
    else:
        found = read_deck(deck, overrides, ranks, _Reader(), partial(named_problems, code=True))
        if found.layout.auto and ranks is not None:
            from hpctrain.plan.search.deck import laid_out

            found = laid_out(found, ranks)
        text = deck_text(found, ranks)
    if launched_rank(os.environ) == 0:
        click.echo(text, nl=False)


class _Reader:
    """Only decks that name a model, or epochs, cost the import of what can read it."""

    def __call__(self, path: str) -> Mapping[str, object]:
        """The keys that a model settles."""
        from hpctrain.checkpoint.exchange.source import settled_keys

        return settled_keys(path)

    def sequences(self, deck: Deck) -> int:
        """Those of an epoch."""
        from hpctrain.checkpoint.exchange.source import settled_keys

        return settled_keys.sequences(deck)
