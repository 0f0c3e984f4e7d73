"""`hpctrain sweep`: train a deck with several values of some keys."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hpctrain.cli.job import directive_option, module_option, program, written
from hpctrain.cli.shared_options import PATH

_OPTIONS = {
    "slots": "--slots",
    "show_only": "--show",
    "picture": "--plot",
    "output": "--json",
    "figure": "--figure",
}
"""Options that conflict with --slurm, by the names of their arguments."""


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
    nodes: int,
    time: str | None,
    force: bool,
    account: str | None,
    partition: str | None,
    directives: tuple[str, ...],
    modules: tuple[str, ...],
    **others: Any,
) -> int:
    """Train DECK with every combination of the values of --set, each in its own run folder.

    Finished runs are not repeated, and stopped runs are resumed. A failed run does not stop the others. After
    Ctrl-C, all runs save a checkpoint and stop. The exit code is 0 if all runs are done, 1 if a run failed,
    and 75 if runs are left.
    """
    from hpctrain.job.batch_job import parse_time
    from hpctrain.job.job_options import JobOptions
    from hpctrain.job.script import render_script, submit_command
    from hpctrain.train.sweep.sweep_deck import sweep_deck, sweep_job

    given: dict[str, object] = {
        "--nodes": nodes > 1,
        "--time": time,
        "--account": account,
        "--partition": partition,
    }
    given |= {"--directive": directives, "--module": modules}
    if script_file is None:
        if asked := [option for option, value in [*given.items(), ("--force", force)] if value]:
            raise click.UsageError(f"{', '.join(asked)} require{'s' * (len(asked) == 1)} --slurm FILE")
        return sweep_deck(deck, arguments, ranks, name=name, show=click.echo, **others)
    if asked := [_OPTIONS[name] for name, value in others.items() if value]:
        raise click.UsageError(f"--slurm conflicts with {', '.join(asked)}")
    seconds = None if time is None else parse_time(time, "slurm")
    options = JobOptions("slurm", (nodes, nodes), seconds, account=account, partition=partition)
    options = replace(options, directives=directives, modules=modules)
    job = sweep_job(deck, arguments, ranks, name, options)
    for warning in job.warnings:
        click.echo(f"hpctrain: warning: {warning}", err=True)
    by = shlex.join(["hpctrain", *(word for word in sys.argv[1:] if word != "--force")])
    with written(script_file, render_script(job, program(), str(script_file), by), force, "--slurm"):
        how = submit_command("slurm", str(script_file))
        click.echo(f"{script_file}: written; submit it with `{how}`", err=True)
    return 0
