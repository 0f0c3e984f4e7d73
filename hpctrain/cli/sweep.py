"""`hpctrain sweep`: train a deck with several values of some keys."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hpctrain.cli.job import directive_option, module_option, program, written

PATH = click.Path(path_type=Path)


@click.command(name="sweep")
@click.argument("deck", type=PATH)
@click.option(
    "--set",
    "arguments",
    multiple=True,
    metavar="KEY=VALUE,VALUE,...",
    help="Values of a key, e.g. learning_rate.peak=1e-4,3e-4; one value is for all runs.",
)
@click.option("--ranks-each", "ranks", type=click.IntRange(1), default=1, show_default=True, help="Of a run.")
@click.option(
    "--slots", type=click.IntRange(1), metavar="N", help="Runs at a time.  [default: as have cores or GPUs]"
)
@click.option("--name", metavar="NAME", help="Of the sweep's folder, beside run.dir.  [default: TITLE-sweep]")
@click.option("--show", "show_only", is_flag=True, help="Train nothing: tell what came of the runs so far.")
@click.option("--plot", "picture", type=PATH, metavar="FILE", help="Draw losses over the values, as PNG.")
@click.option("--json", "output", type=PATH, metavar="FILE", help="Write the table to a file too.")
@click.option(
    "--figure",
    metavar="NAME",
    help="Least of the best run: a set, as checkpoint.keep_best has it, or loss.  [default: validation]",
)
@click.option("--slurm", "script_file", type=PATH, metavar="FILE", help="Train nothing: write an array job.")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Of a run (--slurm).")
@click.option("--time", metavar="T", help='Of a job (--slurm): "2 h" or 2:00:00.')
@click.option("--account", metavar="A", help="Who pays (--slurm).")
@click.option("--partition", metavar="P", help="Partition (--slurm).")
@directive_option
@module_option
@click.option("--force", is_flag=True, help="Replace a script that is there already (--slurm).")
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
    """Train DECK with every combination of the values that --set gives, each run in a folder of its own.

    Runs that are done are not trained again, stopped ones go on, and one that fails stops no other. Ctrl-C
    has them stop with a checkpoint. Exit codes: 0 all are done, 1 one failed, 75 some are left.
    """
    from hpctrain.job.job_options import JobOptions
    from hpctrain.job.ranks import parse_time
    from hpctrain.job.script import script, submission
    from hpctrain.train.sweep.sweep import sweep_deck, sweep_job

    given: dict[str, object] = {
        "--nodes": nodes > 1,
        "--time": time,
        "--account": account,
        "--partition": partition,
    }
    given |= {"--directive": directives, "--module": modules}
    if script_file is None:
        if asked := [option for option, value in [*given.items(), ("--force", force)] if value]:
            raise click.UsageError(f"{', '.join(asked)}: belongs to --slurm FILE")
        return sweep_deck(deck, arguments, ranks, name=name, show=click.echo, **others)
    if asked := [option for option, value in others.items() if value]:
        raise click.UsageError(f"--slurm: writes a script alone, without {', '.join(asked)}")
    seconds = None if time is None else parse_time(time, "slurm")
    wish = JobOptions("slurm", (nodes, nodes), seconds, account=account, partition=partition)
    wish = replace(wish, directives=directives, modules=modules)
    job = sweep_job(deck, arguments, ranks, name, wish)
    for warning in job.warnings:
        click.echo(f"hpctrain: warning: {warning}", err=True)
    by = shlex.join(["hpctrain", *(word for word in sys.argv[1:] if word != "--force")])
    with written(script_file, script(job, program(), str(script_file), by), force, "--slurm"):
        how = submission("slurm", str(script_file))
        click.echo(f"{script_file}: written; submit it by `{how}`", err=True)
    return 0
