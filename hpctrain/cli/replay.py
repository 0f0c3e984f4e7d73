"""`hpctrain replay`: compute steps of a run again, and compare their losses."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.code_options import ReadTrust, add_trust, code_options


@click.command(name="replay")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Steps to run.  [default: as many as were recorded, at most 10]",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key, e.g. layout.tensor=2."
)
@click.option(
    "--against",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Metrics file or later checkpoint that has the losses.  [default: those of the run folder]",
)
@code_options
def command(
    checkpoint: Path,
    steps: int | None,
    overrides: tuple[str, ...],
    against: Path | None,
    trust: ReadTrust,
) -> None:
    """Run on from a checkpoint, writing nothing, and tell step by step whether the recorded losses come out.

    On the layout, ranks and versions that recorded them they must be equal bit for bit, else to rounding.
    Exits with 1 if they do not come out again.
    """
    from hpctrain.comm.verb import run_verb
    from hpctrain.comm.world import World
    from hpctrain.post.trainer import make_trainer
    from hpctrain.train.replay import replay

    def work(world: World) -> int:
        changes = add_trust(world, overrides, trust)
        return replay(world, checkpoint, steps, changes, against, click.echo, make_trainer)

    run_verb(work)
