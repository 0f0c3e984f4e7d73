"""`hpctrain inspect`: show the contents of a checkpoint, token file or run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hpctrain.cli.code_options import ReadTrust, code_options, read_trust
from hpctrain.cli.shared_options import PATH


@click.command(name="inspect")
@click.argument("target", metavar="CHECKPOINT|RUN_DIR|TOKENS", type=PATH)
@click.option("--tensors", is_flag=True, help="List all tensors with name, shape, type and size.")
@click.option(
    "--bad-samples", is_flag=True, help="List the samples that were skipped because of loss spikes."
)
@click.option("--deck", is_flag=True, help="Print only the stored deck.")
@click.option("--verify", is_flag=True, help="Read all data and compare it with its checksums.")
@click.option(
    "--diff",
    "other",
    metavar="OTHER",
    type=PATH,
    help="Show how the tensors of OTHER differ.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@code_options
def command(target: Path, trust: ReadTrust, **values: Any) -> None:
    """Show the contents of a checkpoint or token file, or the checkpoints of a run folder.

    For a checkpoint, the runs that led to it are listed too. Without --verify, only the structure of a file
    is checked, so that damaged tensors are not found. Under mpirun or srun, the ranks share the reading.

    The exit code is 1 if tensors differ from those of OTHER, and 3 if the file is damaged.
    """
    from hpctrain.comm.verb import run_verb
    from hpctrain.comm.world import World
    from hpctrain.report.inspect import InspectOptions, inspect

    def work(world: World) -> int:
        options = InspectOptions(**values, trust=read_trust(world, trust))
        return inspect(world.everyone, target, options, click.echo)

    run_verb(work, device="cpu")
