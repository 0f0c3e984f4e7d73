"""`hpctrain evaluate`: loss, perplexity and bits per byte of a checkpoint on token files."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from hpctrain.cli.code_options import ReadTrust, add_trust, code_options


@click.command(name="evaluate")
@click.argument("target", metavar="RUN_DIR|CHECKPOINT", type=click.Path(path_type=Path))
@click.option(
    "--tokens",
    "files",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A token file made by `hpctrain prepare`, of the model's tokenizer; may be given several times.",
)
@click.option(
    "--task",
    "tasks",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Instead, questions as lines of JSON with prompt, answer and perhaps choices; also several times.",
)
@click.option(
    "--sequences", type=int, metavar="N", help="The first N sequences of each file.  [default: all]"
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Another value of a key of the checkpoint's deck, as of its layout.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of a table.")
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
    """Evaluate the model of a checkpoint, or of the newest good one of a run folder, on token files or tasks.

    Prints the mean loss of a token in nats, its exponential, the perplexity, and bits per byte of text, where
    the tokenizer tells bytes. Under mpirun or srun the ranks share the work by the run's layout, or, where
    that does not fit them, as data ranks; --set layout.tensor=2 and the like choose another. The numbers
    are those of the run's own evaluations. Of a reward model, on files of preferences, it prints how often
    the preferred answer has the higher reward, and by how much. Of a model that learned from preferences
    without one (objective.kind = "dpo"), it prints the loss, accuracy and margins of its run's evaluations
    there; that needs the model that the run started from.

    Of a task with choices it prints how often the right one is the likeliest behind its prompt, as a whole
    and by the byte of its text; of one without, how often the model writes the answer (up to the end of the
    line, each token the likeliest); each with its standard error.
    """
    from hpctrain.comm.verb import run_verb
    from hpctrain.comm.world import World
    from hpctrain.post.task import evaluate_task
    from hpctrain.train.evaluate import evaluate

    say = partial(click.echo, err=True)
    if bool(files) == bool(tasks):
        raise click.UsageError("give token files (--tokens FILE) or tasks (--task FILE), one of both")
    if tasks and sequences is not None:
        raise click.UsageError("--sequences: is for --tokens; of a task all rows are tried")
    if tasks:
        verb = partial(evaluate_task, files=tasks)
    else:
        verb = partial(evaluate, files=files, sequences=sequences)

    def work(world: World) -> None:
        changes = add_trust(world, overrides, trust)
        verb(world, target, overrides=changes, as_json=as_json, show=click.echo, say=say)

    run_verb(work)
