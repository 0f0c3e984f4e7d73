"""`hpctrain sweep`: train a deck with several values of some keys."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.job import directive_option, find_program, module_option, parse_job_options, write_script
from hpctrain.cli.shared_options import PATH

if TYPE_CHECKING:
    from hpctrain.job.batch_job import Job

_TRAINING_OPTIONS = {
    "slots": "--slots",
    "show_only": "--show",
    "picture": "--plot",
    "output": "--json",
    "metric": "--figure",
}
"""Options that conflict with --slurm, by the names of their arguments."""

_SLURM_OPTIONS = {
    "nodes": "--nodes",
    "time": "--time",
    "account": "--account",
    "partition": "--partition",
    "directives": "--directive",
    "modules": "--module",
    "force": "--force",
}
"""Options that require --slurm, by the names of their arguments."""


@click.command(name="sweep")
@click.argument("deck", type=PATH)
@click.option(
    "--set",
    "arguments",
    multiple=True,
    metavar="KEY=VALUE,VALUE,...",
    help="Values of a key, e.g. learning_rate.peak=1e-4,3e-4. A single value applies to all runs.",
)
@click.option(
    "--ranks-each", "ranks", type=click.IntRange(1), default=1, show_default=True, help="Ranks per run."
)
@click.option(
    "--slots",
    type=click.IntRange(1),
    metavar="N",
    help="Number of runs at the same time.  [default: as many as have cores or GPUs]",
)
@click.option(
    "--name", metavar="NAME", help="Name of the folder of the sweep, next to run.dir.  [default: TITLE-sweep]"
)
@click.option("--show", "show_only", is_flag=True, help="Show the state of all runs without training.")
@click.option(
    "--plot", "picture", type=PATH, metavar="FILE", help="Plot the losses over the values as a PNG file."
)
@click.option("--json", "output", type=PATH, metavar="FILE", help="Also write the table to FILE.")
@click.option(
    "--figure",
    "metric",
    metavar="NAME",
    help="Value by which the best run is chosen: loss, or an evaluation set as in checkpoint.keep_best.  "
    "[default: validation]",
)
@click.option(
    "--slurm",
    "script_file",
    type=PATH,
    metavar="FILE",
    help="Write an array job for Slurm instead of training.",
)
@click.option(
    "--nodes", type=click.IntRange(1), default=1, show_default=True, help="Nodes per run (--slurm)."
)
@click.option("--time", metavar="T", help='Time limit of a job (--slurm), as "2 h" or 2:00:00.')
@click.option("--account", metavar="A", help="Account that is charged (--slurm).")
@click.option("--partition", metavar="P", help="Partition (--slurm).")
@directive_option
@module_option
@click.option("--force", is_flag=True, help="Replace an existing script (--slurm).")
def command(
    deck: Path,
    arguments: tuple[str, ...],
    ranks: int,
    name: str | None,
    script_file: Path | None,
    **options: Any,
) -> int:
    """Train DECK with every combination of the values of --set, each in its own run folder.

    Finished runs are not repeated, and stopped runs are resumed. A failed run does not stop the others. After
    Ctrl-C, all runs save a checkpoint and stop. The exit code is 0 if all runs are done, 1 if a run failed,
    and 75 if runs are left.
    """
    from hpctrain.train.sweep.sweep_deck import SweepTrainingOptions, sweep_deck, sweep_job

    training = {key: options[key] for key in _TRAINING_OPTIONS}
    slurm = {key: options[key] for key in _SLURM_OPTIONS}
    if script_file is None:
        changed = slurm | {"nodes": slurm["nodes"] > 1}
        if names := [option for key, option in _SLURM_OPTIONS.items() if changed[key]]:
            raise click.UsageError(f"{', '.join(names)} require{'s' * (len(names) == 1)} --slurm FILE")
        return sweep_deck(deck, arguments, ranks, name, SweepTrainingOptions(**training), click.echo)
    if names := [option for key, option in _TRAINING_OPTIONS.items() if training[key]]:
        raise click.UsageError(f"--slurm conflicts with {', '.join(names)}")
    force, nodes = slurm.pop("force"), str(slurm.pop("nodes"))
    job_options = parse_job_options("slurm", nodes=nodes, **slurm)
    write_array_job(sweep_job(deck, arguments, ranks, name, job_options), script_file, force)
    return 0


def write_array_job(job: Job, path: Path, force: bool) -> None:
    """Write the script of an array job, and print its warnings.

    Args:
        job: The job.
        path: The script.
        force: True if it may replace another script.
    """
    from hpctrain.job.script import render_script, submit_command

    for warning in job.warnings:
        click.echo(f"hpctrain: warning: {warning}", err=True)
    command_line = shlex.join(["hpctrain", *(word for word in sys.argv[1:] if word != "--force")])
    with write_script(path, render_script(job, find_program(), str(path), command_line), force, "--slurm"):
        hint = submit_command("slurm", str(path))
        click.echo(f"{path}: written; submit it with `{hint}`", err=True)
