"""`hpctrain run`: train a deck."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.shared_options import PATH, set_option
from hpctrain.train.signals import record_signals


@click.command(name="run")
@click.argument("deck", type=PATH)
@set_option("run.steps=100")
@click.option(
    "--fresh",
    is_flag=True,
    help="Delete the files of an earlier run in the same run folder first. Other files stay.",
)
@click.option(
    "--resume",
    "resumes",
    is_flag=True,
    help="Continue from the newest valid checkpoint in the run folder, if there is one.",
)
@click.option(
    "--replay-routing",
    "routing_file",
    metavar="FILE",
    type=PATH,
    help="Send tokens to the experts recorded in FILE, a routing.h5 (model.experts.record_routing).",
)
@click.option(
    "--verify-layout", is_flag=True, help="First check a tiny step of this layout against one rank."
)
def command(
    deck: Path,
    overrides: tuple[str, ...],
    fresh: bool,
    resumes: bool,
    routing_file: Path | None,
    verify_layout: bool,
) -> None:
    """Train the model of DECK, as one process or under mpirun or srun.

    With --resume, as in batch scripts, the same command starts a run and continues it. Ctrl-C saves a
    checkpoint and stops the run with exit code 75. A second Ctrl-C ends the run at once with exit code 130.
    """
    record_signals()
    from hpctrain.comm.verb import run_verb
    from hpctrain.post.policy_trainer import make_trainer
    from hpctrain.train.run import run_deck

    if fresh and resumes:
        raise click.UsageError("--fresh conflicts with --resume")
    changes = [*overrides, "stability.verify_layout=true"] if verify_layout else overrides
    run_verb(lambda world: run_deck(world, deck, changes, fresh, resumes, routing_file, make_trainer))
