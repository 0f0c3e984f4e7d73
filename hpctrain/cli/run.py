"""`hpctrain run`: train a deck."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.train.signals import heed_from_now


@click.command(name="run")
@click.argument("deck", type=click.Path(path_type=Path))
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key, e.g. run.steps=100."
)
@click.option(
    "--fresh",
    is_flag=True,
    help="Replace an earlier run in the same run folder: what it wrote is deleted, all else stays.",
)
@click.option(
    "--resume", "again", is_flag=True, help="Go on from the newest good checkpoint in the run folder, if any."
)
@click.option(
    "--replay-routing",
    "replayed",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Tokens go to the experts that FILE names, a routing.h5 (model.experts.record_routing).",
)
@click.option(
    "--verify-layout", is_flag=True, help="First compare a tiny step of this layout with one rank's."
)
def command(
    deck: Path,
    overrides: tuple[str, ...],
    fresh: bool,
    again: bool,
    replayed: Path | None,
    verify_layout: bool,
) -> None:
    """Train the model of DECK, alone or under mpirun or srun.

    With --resume, which batch scripts use, the same command begins a run and goes on with it. Ctrl-C saves a
    checkpoint and stops with exit code 75; a second one ends the run at once, with 130.
    """
    heed_from_now()
    from hpctrain.comm.verb import run_verb
    from hpctrain.post.trainer import make_trainer
    from hpctrain.train.run import run_deck

    if fresh and again:
        raise click.UsageError("--fresh and --resume exclude one another")
    changes = [*overrides, "stability.verify_layout=true"] if verify_layout else overrides
    run_verb(lambda world: run_deck(world, deck, changes, fresh, again, replayed, make_trainer))
