"""`hpctrain check`: compare a layout with one rank."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="check")
@click.argument("deck", type=click.Path(path_type=Path))
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key, e.g. layout.tensor=2."
)
@click.option(
    "--ranks",
    type=click.IntRange(1, 1 << 12),
    metavar="N",
    help="Start N ranks on this machine.  [default: those that a launcher has started]",
)
def command(deck: Path, overrides: tuple[str, ...], ranks: int | None) -> None:
    """Compare what DECK computes on its layout with what one rank computes, without training or its tokens.

    Two steps of the model in miniature, by the run's own step: initial parameters, losses, every gradient,
    norms, parameters after the update and all other state, each beside those of one rank. Of a tensor that
    differs it says by how much, how it is split, and which sum too many or too few would explain it. Exits
    with 1 if one does.

    A module that users bring is compared in fp64 with its own code in plain torch, too, with the arguments in
    [model.miniature] if there are any, and run by itself to find state, random numbers and losses that no
    other number of ranks would go with.
    """
    from hpctrain.comm.verb import run_verb
    from hpctrain.host.commands import restart_on_ranks
    from hpctrain.train.check import check

    restart_on_ranks(ranks)
    run_verb(lambda world: check(world, deck, overrides, click.echo))
