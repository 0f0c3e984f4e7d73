"""`hpctrain calibrate`: measure the rates of a machine for plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hpctrain.cli.shared_options import PATH


@click.command(name="calibrate")
@click.option(
    "--out",
    "path",
    type=PATH,
    default="machine.toml",
    show_default=True,
    metavar="FILE",
    help="File for the measured rates.",
)
@click.option(
    "--like",
    "decks",
    type=PATH,
    multiple=True,
    metavar="DECK",
    help="Measure with the matrix shapes of this deck's model. May be repeated.  "
    "[default: GPT models of 17M and 124M parameters]",
)
@click.option(
    "--formats",
    default="fp32,bf16",
    show_default=True,
    help="Number formats, separated by commas: fp32, bf16, fp16.",
)
@click.option("--max-bytes", "most", default="1 GiB", show_default=True, help="Size of the largest message.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, 60),
    default=0.1,
    show_default=True,
    help="Duration of each measurement.",
)
@click.option(
    "--device",
    default="auto",
    metavar="NAME",
    show_default=True,
    help="Device to measure: auto (a GPU where torch finds one), cpu, cuda or xpu.",
)
def command(path: Path, device: str, **values: Any) -> None:
    """Measure the rates of this machine for `hpctrain plan --machine FILE`.

    Start it as one process or under mpirun or srun.

    All ranks measure at the same time, since the ranks of a node share its memory and power. Start as many
    ranks per node as a run will have. It takes about a minute.

    Measured are: matrix products in the shapes of models, in forward and backward passes and with the kernels
    that runs choose on this machine; attention; elementwise operations; memory bandwidth; the optimizer;
    collectives and messages by size, inside nodes and between them; and how much of the communication
    computation hides.
    """
    from hpctrain.comm.verb import run_verb
    from hpctrain.plan.calibrate.calibration import CalibrateOptions, calibrate

    run_verb(lambda world: calibrate(world, path, CalibrateOptions(**values)), device)
