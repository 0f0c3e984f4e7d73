"""`hpctrain replay`: compute steps of a run again, and compare their losses."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.code_options import ReadTrust, add_trust, code_options
from hpctrain.cli.shared_options import PATH, set_option


@click.command(name="replay")
@click.argument("checkpoint", metavar="RUN|CHECKPOINT", type=PATH)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of steps to repeat.  [default: all recorded ones, at most 10]",
)
@set_option()
@click.option(
    "--against",
    metavar="FILE",
    type=PATH,
    help="Metrics file or later checkpoint with the recorded losses.  [default: metrics of the run folder]",
)
@code_options
def command(
    checkpoint: Path,
    steps: int | None,
    overrides: tuple[str, ...],
    against: Path | None,
    trust: ReadTrust,
) -> None:
    """Repeat steps after a checkpoint, and compare their losses with the recorded ones. Nothing is written.

    For a run folder, RUN, its newest checkpoint is taken after which enough losses are recorded.

    With the same layout, ranks and versions, losses must be equal in every bit, otherwise up to rounding. The
    exit code is 1 if they differ.
    """
    from hpctrain.comm.verb import run_verb
    from hpctrain.comm.world import World
    from hpctrain.post.policy_trainer import make_trainer
    from hpctrain.train.replay import replay

    def work(world: World) -> int:
        changes = add_trust(world, overrides, trust)
        return replay(world, checkpoint, steps, changes, against, click.echo, make_trainer)

    run_verb(work)
