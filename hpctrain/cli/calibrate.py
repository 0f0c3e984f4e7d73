"""`hpctrain calibrate`: measure the rates of a machine for plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command(name="calibrate")
@click.option(
    "--out",
    "path",
    type=click.Path(path_type=Path),
    default="machine.toml",
    show_default=True,
    metavar="FILE",
    help="Where the figures go.",
)
@click.option(
    "--like",
    "decks",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="DECK",
    help="Measure the shapes of this deck's model.  [default: GPTs of 17M and of 124M parameters]",
)
@click.option("--formats", default="fp32,bf16", show_default=True, help="Comma-separated; also fp16.")
@click.option("--max-bytes", "most", default="1 GiB", show_default=True, help="Of the largest message.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, 60),
    default=0.1,
    show_default=True,
    help="For which each measurement is repeated.",
)
def command(path: Path, **wish: Any) -> None:
    """Measure this machine, alone or under mpirun or srun, for `hpctrain plan --machine FILE`.

    All ranks measure at once, since those of a node share its memory and power: start as many on each node as
    a run will have. It takes about a minute. Measured are matrix products over the shapes of models, in all
    their passes and by the kernels that runs choose here, attention, what is done to elements, memory, the
    optimizer, sums and messages by size inside nodes and between them, and what of these computing hides.
    """
    from hpctrain.comm.verb import run_verb
    from hpctrain.plan.calibrate.calibrate import CalibrateOptions, calibrate

    run_verb(lambda world: calibrate(world, path, CalibrateOptions(**wish)))
