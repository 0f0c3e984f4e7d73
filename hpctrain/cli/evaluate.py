"""`hpctrain evaluate`: loss, perplexity and bits per byte of a checkpoint on token files."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from hpctrain.cli.code_options import ReadTrust, add_trust, code_options
from hpctrain.cli.shared_options import PATH, set_option


@click.command(name="evaluate")
@click.argument("target", metavar="RUN_DIR|CHECKPOINT", type=PATH)
@click.option(
    "--tokens",
    "files",
    multiple=True,
    metavar="FILE",
    type=PATH,
    help="Token file of `hpctrain prepare` with the tokenizer of the model. May be repeated.",
)
@click.option(
    "--task",
    "tasks",
    multiple=True,
    metavar="FILE",
    type=PATH,
    help="JSON lines with the keys prompt, answer and optionally choices. May be repeated.",
)
@click.option(
    "--sequences",
    type=int,
    metavar="N",
    help="Evaluate the first N sequences of each token file.  [default: all]",
)
@set_option(key="a key of the stored deck")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@code_options
def command(
    target: Path,
    files: tuple[Path, ...],
    tasks: tuple[Path, ...],
    sequences: int | None,
    overrides: tuple[str, ...],
    as_json: bool,
    trust: ReadTrust,
) -> None:
    """Evaluate a checkpoint, or the newest valid checkpoint of a run folder, on token files or tasks.

    For token files, the mean loss per token in nats, the perplexity and, if the tokenizer has byte counts,
    the bits per byte of text are printed, as in evaluations during the run. For a reward model and files of
    preferences, the fraction of pairs in which the chosen answer has the higher reward and the mean margin
    are printed. For a model trained with objective.kind = "dpo", the loss, accuracy and margins are printed;
    this requires the model that the run started from.

    For tasks with choices, the accuracy is printed: how often the correct choice has the highest probability,
    in total and per byte of its text. For tasks without choices, exact match is printed: how often greedy
    decoding gives the answer up to the end of the line. Both have their standard errors.

    Under mpirun or srun, the layout of the run is used if it fits the number of ranks, otherwise data
    parallelism. --set layout.tensor=2 chooses another layout.
    """
    from hpctrain.comm.verb import run_verb
    from hpctrain.comm.world import World
    from hpctrain.post.task import evaluate_task
    from hpctrain.train.evaluate import EvaluationData, evaluate

    say = partial(click.echo, err=True)
    if bool(files) == bool(tasks):
        raise click.UsageError("exactly one of --tokens FILE and --task FILE is required")
    if tasks and sequences is not None:
        raise click.UsageError("--sequences requires --tokens; all rows of a task are evaluated")
    if tasks:
        verb = partial(evaluate_task, files=tasks)
    else:
        verb = partial(evaluate, data=EvaluationData(files, sequences))

    def work(world: World) -> None:
        changes = add_trust(world, overrides, trust)
        verb(world, target, overrides=changes, as_json=as_json, show=click.echo, say=say)

    run_verb(work)
