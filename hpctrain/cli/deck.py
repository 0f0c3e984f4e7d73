"""`hpctrain deck`: the resolved deck, or the reference of all keys."""

from __future__ import annotations

import click


@click.command(name="deck")
@click.argument("deck", required=False)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key, as layout.tensor=2.")
@click.option("--ranks", type=click.IntRange(min=1), metavar="N", help="Check the deck against N ranks too.")
@click.option("--reference", is_flag=True, help="Print every key with type, default, unit and help instead.")
def command(deck: str | None, overrides: tuple[str, ...], ranks: int | None, reference: bool) -> None:
    """Print the deck in file DECK with every default filled in, or say all that is wrong with it."""
    from hpctrain.deck.read import deck_text, read_deck
    from hpctrain.deck.reference import reference_text

    if reference:
        click.echo(reference_text(), nl=False)
    elif deck is None:
        raise click.UsageError("give a DECK, or --reference")
    else:
        click.echo(deck_text(read_deck(deck, overrides, ranks), ranks), nl=False)
