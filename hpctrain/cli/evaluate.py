"""`hpctrain evaluate`: loss, perplexity and bits per byte of a checkpoint on token files."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click


@click.command(name="evaluate")
@click.argument("target", metavar="RUN_DIR|CHECKPOINT", type=click.Path(path_type=Path))
@click.option(
    "--tokens",
    "files",
    multiple=True,
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A token file made by `hpctrain prepare`, of the model's tokenizer; may be given several times.",
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
def command(
    target: Path, files: tuple[Path, ...], sequences: int | None, overrides: tuple[str, ...], as_json: bool
) -> None:
    """Evaluate the model of a checkpoint, or of the newest good one of a run folder, on token files.

    Prints the mean loss of a token in nats, its exponential, the perplexity, and bits per byte of text, where
    the tokenizer tells bytes. Under mpirun or srun the ranks share the work by the run's layout, or, where
    that does not fit them, as data ranks; --set layout.tensor=2 and the like choose another. The numbers
    are those of the run's own evaluations.
    """
    from hpctrain.comm.verb import run_verb
    from hpctrain.train.evaluate import evaluate

    say = partial(click.echo, err=True)
    run_verb(lambda world: evaluate(world, target, files, sequences, overrides, as_json, click.echo, say))
