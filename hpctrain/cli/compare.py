"""`hpctrain compare`: find where two runs diverge."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.code_options import ReadTrust, code_options, read_trust


@click.command(name="compare")
@click.argument("first", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("second", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Steps to replay.  [default: up to where records or checkpoints differ, at most 50]",
)
@click.option("--no-replay", is_flag=True, help="Compare decks, figures and records alone.")
@click.option("--figures", is_flag=True, help="Show decks and figures alone, and exit with 0.")
@code_options
def command(
    first: Path, second: Path, steps: int | None, no_replay: bool, figures: bool, trust: ReadTrust
) -> None:
    """Tell how two runs differ, and the first step, phase and tensor in which they part.

    RUN is a run's folder, or one of its checkpoints. Both are replayed from the newest checkpoint at which
    they agree, each by its own deck; nothing is written. Under mpirun or srun the ranks compute together,
    with the layout of each run where it fits them. Exits with 1 where the runs differ beyond rounding, or in
    bits where nothing lets these differ.
    """
    from hpctrain.comm.verb import run_verb
    from hpctrain.comm.world import World
    from hpctrain.train.compare import compare

    if figures and steps is not None:
        raise click.UsageError("--steps is for a replay, which --figures leaves out")

    def work(world: World) -> int:
        known = read_trust(world, trust)
        return compare(world, (first, second), steps, not no_replay, click.echo, figures, known)

    run_verb(work)
