"""`hpctrain job`: write or submit a batch script for a deck."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.shared_options import PATH, set_option
from hpctrain.errors import HpctrainError, InputOutputError, failing_as

if TYPE_CHECKING:
    from hpctrain.job.job_options import JobOptions, Scheduler

directive_option = click.option(
    "--directive",
    "directives",
    multiple=True,
    metavar='"--OPTION=VALUE"',
    help="Add an option for the scheduler, e.g. --qos=high. May be repeated.",
)
module_option = click.option(
    "--module",
    "modules",
    multiple=True,
    metavar="NAME",
    help="Load an environment module in the script, e.g. openmpi/5. May be repeated.",
)


@click.command(name="job")
@click.argument("deck", type=PATH)
@click.option(
    "--scheduler",
    type=click.Choice(["slurm", "pbs", "lsf", "flux", "kubernetes"]),
    default="slurm",
    show_default=True,
    help="Scheduler that the script is written for.",
)
@click.option(
    "--launcher",
    type=click.Choice(["srun", "mpirun"]),
    help="Program that starts the ranks.  [default: srun for slurm, else mpirun]",
)
@click.option(
    "--nodes", default="1", show_default=True, metavar="N|M-N", help="Number of nodes, or a range of numbers."
)
@click.option(
    "--ranks-per-node",
    type=click.IntRange(min=1),
    metavar="R",
    help="Ranks per node.  [default: machine.ranks_per_node]",
)
@click.option(
    "--gpus-per-node",
    type=click.IntRange(min=0),
    metavar="G",
    help="GPUs per node.  [default: machine.gpus_per_node]",
)
@click.option(
    "--cores-per-rank",
    type=click.IntRange(min=1),
    metavar="C",
    help="Cores per rank.  [default: run.threads]",
)
@click.option("--mpi", metavar="NAME", help="Value of srun --mpi, e.g. pmi2 or cray_shasta.  [default: pmix]")
@click.option(
    "--time", metavar="T", help='Time limit, as "2 h" or 2:00:00.  [default: 1 h; kubernetes: none]'
)
@click.option("--account", metavar="A", help="Account that is charged.")
@click.option("--partition", metavar="P", help="Partition or queue.")
@set_option("layout.zero=3")
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar='"KEY=VALUE ..."',
    help="Add a job to an array (slurm): the deck with these overrides. May be repeated.",
)
@directive_option
@module_option
@click.option("--image", metavar="NAME", help="Container image (kubernetes).  [default: hpctrain]")
@click.option(
    "--volume",
    metavar="CLAIM[:PATH]",
    help="Volume claim and its mount path (kubernetes).  [default: hpctrain:/work]",
)
@click.option(
    "--shared-memory",
    metavar="SIZE",
    help="Size of /dev/shm (kubernetes).  [default: 1 GiB, more from 5 ranks per node]",
)
@click.option("--output", type=PATH, metavar="FILE", help="Write the script to FILE.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--submit", is_flag=True, help="Submit the script and print the job id.")
def command(
    deck: Path, overrides: tuple[str, ...], output: Path | None, force: bool, submit: bool, **options: Any
) -> None:
    """Write a batch script that trains DECK, stops before the time limit, and continues in the next job.

    Ranks, binding, memory and signals follow from the layout and the section [machine] of the deck. Without
    --output and --submit, the script is printed.
    """
    from hpctrain.job.batch_job import plan_job
    from hpctrain.job.script import SUBMIT, render_script, submit_command

    job_options = parse_job_options(**options)
    submitter = SUBMIT[job_options.scheduler]
    if submit and shutil.which(submitter[0]) is None:
        raise HpctrainError(
            f"--submit: the command {submitter[0]} was not found; submit from a node that has it, or write "
            "the script with --output"
        )
    job = plan_job(deck, overrides, job_options)
    for warning in job.warnings:
        click.echo(f"hpctrain: warning: {warning}", err=True)
    if output is None and submit:
        output = Path(f"{job.name}.{'yaml' if job_options.scheduler == 'kubernetes' else 'sh'}")
    written_by = shlex.join(["hpctrain", *(word for word in sys.argv[1:] if word != "--force")])
    text = render_script(job, find_program(), str(output or "FILE"), written_by, placeholders=not submit)
    if output is None:
        click.echo(text, nl=False)
        return
    with write_script(output, text, force):
        if submit:
            click.echo(submit_script(submitter, output))
    hint = "" if submit else f"; submit it with `{submit_command(job_options.scheduler, str(output))}`"
    click.echo(f"{output}: written{hint}", err=True)


def parse_job_options(scheduler: Scheduler, time: str | None, **options: Any) -> JobOptions:
    """Return the options of a job.

    Args:
        scheduler: Scheduler that the script is for.
        time: Time limit as text.
        **options: Further attributes of `JobOptions`, as on the command line.
    """
    from hpctrain.job.batch_job import parse_nodes, parse_shared_memory, parse_time, parse_volume
    from hpctrain.job.job_options import JobOptions

    parsers: dict[str, Callable[[Any], object]] = {
        "nodes": parse_nodes,
        "variants": lambda variants: tuple(tuple(variant.split()) for variant in variants),
        "volume": parse_volume,
        "shared_memory": parse_shared_memory,
    }
    parsed: dict[str, Any] = {
        name: parsers[name](value) if name in parsers and value is not None else value
        for name, value in options.items()
    }
    return JobOptions(scheduler, seconds=None if time is None else parse_time(time, scheduler), **parsed)


def find_program() -> str:
    """Return the path of hpctrain for a job: in the environment of this folder, or of this process."""
    if Path(".venv/bin/hpctrain").exists():
        return ".venv/bin/hpctrain"
    installed = Path(sys.executable).parent / "hpctrain"
    return str(installed) if installed.exists() else "hpctrain"


@contextmanager
def write_script(path: Path, text: str, force: bool, option: str = "--output") -> Iterator[None]:
    """Write a script, executable unless it is YAML. If the block fails, the earlier file is restored.

    Args:
        path: The script.
        text: Its text.
        force: True if it may replace another script.
        option: Option by which the user names the file, for messages.

    Raises:
        HpctrainError: Another file exists and may not be replaced, or the script cannot be written.
    """
    try:
        earlier = path.read_bytes() if path.is_file() else None
        is_new = earlier is None
        if is_new or (force and earlier != text.encode()):
            with path.open("x" if is_new else "w", encoding="utf-8") as stream:
                stream.write(text)
            if path.suffix != ".yaml":
                path.chmod(path.stat().st_mode | 0o111)
        elif earlier != text.encode():
            raise HpctrainError(
                f"{path}: already exists (replace it with --force, or choose another file with {option})"
            )
    except FileExistsError:
        raise HpctrainError(
            f"{path}: exists and is not a regular file; choose another file with {option}"
        ) from None
    except OSError as error:
        raise InputOutputError(f"{path}: {error.strerror or error}") from error
    try:
        yield
    except HpctrainError:
        with suppress(OSError):
            path.unlink() if earlier is None else path.write_bytes(earlier)
        raise


def submit_script(submitter: tuple[str, ...], path: Path) -> str:
    """Submit a script and return the answer of the scheduler, which contains the number of the job.

    Args:
        submitter: Command of the scheduler with its arguments. If the last one is "<", it reads the script
            from stdin.
        path: The script.

    Raises:
        HpctrainError: The scheduler refuses the script.
        InputOutputError: The command cannot be started.
    """
    reads_stdin = submitter[-1] == "<"
    arguments = submitter[:-1] if reads_stdin else [*submitter, f"./{path}" if str(path)[0] == "-" else path]
    with failing_as(submitter[0]), path.open(encoding="utf-8") as stream:
        process = subprocess.run(
            arguments,
            stdin=stream if reads_stdin else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    if process.returncode:
        message = " ".join((process.stderr or process.stdout).split()) or f"exit code {process.returncode}"
        raise HpctrainError(f"{submitter[0]} refused {path}: {message}")
    return process.stdout.strip()
