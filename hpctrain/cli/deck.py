"""`hpctrain deck`: print a resolved deck, the reference of all keys, or a converted deck."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.shared_options import set_option

if TYPE_CHECKING:
    from hpctrain.deck.schema import Deck


@click.command(name="deck")
@click.argument("deck", metavar="DECK|SECTION", required=False)
@set_option()
@click.option(
    "--ranks", type=click.IntRange(1, 1 << 20), metavar="N", help="Also check the deck against N ranks."
)
@click.option(
    "--reference", is_flag=True, help="Print all keys, or those of SECTION, with their types and defaults."
)
@click.option(
    "--migrate", is_flag=True, help="Print DECK as written, with renamed keys under their current names."
)
@click.option(
    "--from",
    "source",
    metavar="FILE",
    help="Convert a DeepSpeed configuration or a script with Megatron-LM arguments to a deck.",
)
def command(
    deck: str | None,
    overrides: tuple[str, ...],
    ranks: int | None,
    reference: bool,
    migrate: bool,
    source: str | None,
) -> None:
    """Print the deck in file DECK with every default filled in, or report all of its errors.

    Files that the deck names are checked too, but the token file may be missing. With --ranks, a layout is
    chosen if the deck has layout = "auto".

    With --from, FILE is a ds_config.json, or a script or text file with Megatron-LM arguments. The printed
    deck begins with a list of the options that it does not support, and has missing required keys as
    comments.

    With --migrate, keys that were renamed, such as optimizer.momentum, are printed under their current
    names. Comments and all other lines stay.

    Under mpirun or srun, the deck is checked against the number of started ranks, and rank 0 prints.
    """
    from hpctrain.deck.read import read_deck
    from hpctrain.deck.reference import reference_text
    from hpctrain.deck.toml_text import deck_text
    from hpctrain.host.launcher import launched_rank, launched_size
    from hpctrain.plan.deck_references import reference_problems

    size = launched_size(os.environ)
    if ranks is None and size > 1:
        ranks = size
    if source is not None:
        from hpctrain.deck.convert.deck_text import converted_deck

        if deck is not None or overrides or reference or migrate:
            raise click.UsageError("--from conflicts with DECK, --set, --reference and --migrate")
        text = converted_deck(source)
    elif reference:
        from hpctrain.report.terminal import columns

        width = columns()
        text = reference_text(deck) if width is None else reference_text(deck, width)
    elif deck is None:
        raise click.UsageError("one of DECK, --from and --reference is required")
    elif migrate:
        from hpctrain.deck.reading.migrate import migrated_text

        if overrides:
            raise click.UsageError("--migrate conflicts with --set, since it prints the deck as written")
        text = migrated_text(Path(deck))
    else:
        resolved = read_deck(deck, overrides, ranks, _SourceReader(), partial(reference_problems, code=True))
        if resolved.layout.auto and ranks is not None:
            from hpctrain.plan.search.deck_search import laid_out

            resolved = laid_out(resolved, ranks)
        text = deck_text(resolved, ranks)
    if launched_rank(os.environ) == 0:
        click.echo(text, nl=False)


class _SourceReader:
    """Reader of models and token files, whose modules are imported only for decks that need them."""

    def __call__(self, path: str) -> Mapping[str, object]:
        """Return the keys that the model in `path` determines."""
        from hpctrain.checkpoint.exchange.source import read_source_keys

        return read_source_keys(path)

    def sequences(self, deck: Deck) -> int:
        """Return the number of sequences in an epoch of a deck."""
        from hpctrain.checkpoint.exchange.source import read_source_keys

        return read_source_keys.sequences(deck)
