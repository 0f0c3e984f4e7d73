"""`hpctrain compare`: find where two runs diverge."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.code_options import ReadTrust, code_options, read_trust
from hpctrain.cli.shared_options import PATH


@click.command(name="compare")
@click.argument("first", metavar="RUN", type=PATH)
@click.argument("second", metavar="RUN", type=PATH)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of steps to repeat.  [default: up to the first recorded difference, at most 50]",
)
@click.option("--no-replay", is_flag=True, help="Compare only decks, metrics and recorded losses.")
@click.option("--figures", is_flag=True, help="Show only decks and metrics, and exit with 0.")
@code_options
def command(
    first: Path, second: Path, steps: int | None, no_replay: bool, figures: bool, trust: ReadTrust
) -> None:
    """Compare two runs, and find the first step, phase and tensor in which they differ.

    RUN is a run folder or a checkpoint. Steps of both runs are repeated from the newest checkpoint at which
    they are equal, each with its own deck. Nothing is written. Under mpirun or srun, the layout of each run
    is used if it fits the number of ranks. The exit code is 1 if the runs differ by more than rounding, or in
    any bit although they must be equal.
    """
    from hpctrain.comm.verb import run_verb
    from hpctrain.comm.world import World
    from hpctrain.train.run_comparison import compare

    if figures and steps is not None:
        raise click.UsageError("--steps conflicts with --figures, which repeats no steps")

    def work(world: World) -> int:
        code_trust = read_trust(world, trust)
        return compare(world, (first, second), steps, not no_replay, click.echo, figures, code_trust)

    run_verb(work)
