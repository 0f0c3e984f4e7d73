"""`hpctrain job`: a batch script for a deck, written or submitted."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import cast

import click

from hpctrain.errors import HpctrainError, InputOutputError


@click.command(name="job")
@click.argument("deck", type=click.Path(path_type=Path))
@click.option(
    "--scheduler",
    type=click.Choice(["slurm", "pbs", "lsf", "flux", "kubernetes"]),
    default="slurm",
    show_default=True,
    help="For whom the script is.",
)
@click.option("--launcher", type=click.Choice(["srun", "mpirun"]), help="Who starts the ranks (slurm: srun).")
@click.option(
    "--nodes", default="1", show_default=True, metavar="N|M-N", help="Nodes; M to N, as many as there are."
)
@click.option(
    "--ranks-per-node", type=click.IntRange(min=1), metavar="R", help="Default: machine.ranks_per_node."
)
@click.option(
    "--gpus-per-node", type=click.IntRange(min=0), metavar="G", help="Default: machine.gpus_per_node."
)
@click.option("--time", metavar="T", help='Time of a job: "2 h" or 2:00:00 (an hour; kubernetes: for ever).')
@click.option("--account", metavar="A", help="Who pays.")
@click.option("--partition", metavar="P", help="Partition, or queue.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key, e.g. layout.zero=3."
)
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar='"KEY=VALUE ..."',
    help="One job of an array (slurm): the same deck with these changes. As often as you like.",
)
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="Write it there.")
@click.option("--submit", is_flag=True, help="Submit it too, and print the job's number.")
def command(
    deck: Path,
    scheduler: str,
    launcher: str | None,
    nodes: str,
    ranks_per_node: int | None,
    gpus_per_node: int | None,
    time: str | None,
    account: str | None,
    partition: str | None,
    overrides: tuple[str, ...],
    variants: tuple[str, ...],
    output: Path | None,
    submit: bool,
) -> None:
    """Write a batch script that trains DECK, stops in time, and goes on where it stopped.

    Ranks, binding, memory and signals follow from the deck's layout and its [machine]. Without --output
    and --submit the script is printed.
    """
    from hpctrain.plan.job import Launcher, Scheduler, Wish, parse_nodes, parse_time, plan_job
    from hpctrain.plan.job_script import SUBMIT, script

    wish = Wish(
        scheduler=cast(Scheduler, scheduler),
        nodes=parse_nodes(nodes),
        seconds=None if time is None else parse_time(time),
        launcher=cast(Launcher | None, launcher),
        ranks_per_node=ranks_per_node,
        gpus_per_node=gpus_per_node,
        account=account,
        partition=partition,
        variants=tuple(tuple(variant.split()) for variant in variants),
    )
    submitter = SUBMIT[wish.scheduler]
    if submit and shutil.which(submitter[0]) is None:
        raise HpctrainError(
            f"--submit: there is no command {submitter[0]} here; submit from a node that has it, or write "
            "the script with --output"
        )
    job = plan_job(deck, overrides, wish)
    for warning in job.warnings:
        click.echo(f"hpctrain: warning: {warning}", err=True)
    if output is None and submit:
        output = Path(f"{job.name}.{'yaml' if scheduler == 'kubernetes' else 'sh'}")
    text = script(job, program(), str(output or "FILE"), told(), placeholders=not submit)
    if output is None:
        click.echo(text, nl=False)
        return
    write(output, text)
    if submit:
        click.echo(submitted(submitter, output))


def program() -> str:
    """How a job starts hpctrain from this folder: the environment in it, or the one that this runs in."""
    if Path(".venv/bin/hpctrain").exists():
        return ".venv/bin/hpctrain"
    beside = Path(sys.executable).parent / "hpctrain"
    return str(beside) if beside.exists() else "hpctrain"


def told() -> str:
    """This command line."""
    return shlex.join(["hpctrain", *sys.argv[1:]])


def write(path: Path, text: str) -> None:
    """Write a script, executable unless it is YAML."""
    try:
        path.write_text(text, encoding="utf-8")
        if path.suffix != ".yaml":
            path.chmod(path.stat().st_mode | 0o111)
    except OSError as error:
        raise InputOutputError(f"{path}: {error.strerror or error}") from error


def submitted(submitter: tuple[str, ...], path: Path) -> str:
    """Submit a script; what the scheduler answers, which has the job's number."""
    try:
        with path.open(encoding="utf-8") as stream:
            done = subprocess.run(
                submitter[:-1] if submitter[-1] == "<" else [*submitter, str(path)],
                stdin=stream if submitter[-1] == "<" else subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
    except OSError as error:
        raise InputOutputError(f"{submitter[0]}: {error.strerror or error}") from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise HpctrainError(f"{submitter[0]} refused {path}: {said}")
    return done.stdout.strip()
