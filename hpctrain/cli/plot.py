"""`hpctrain plot RUN_DIR...`: plot the metrics of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click


@click.command(name="plot")
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path), help="Folder for the pictures.")
@click.option("--log-loss", is_flag=True, help="Logarithmic scale for the loss.")
@click.option(
    "--x",
    "axis",
    type=click.Choice(["steps", "tokens", "time"]),
    help="Draw over steps, tokens seen, or the time that steps took.  [default: steps]",
)
@click.option(
    "--against",
    type=click.Choice(["bytes", "time"]),
    help="Draw the loss alone, against bytes sent or seconds, runs labelled by what differs in their decks.",
)
def command(
    run_dirs: tuple[Path, ...],
    out: Path | None,
    log_loss: bool,
    axis: Literal["steps", "tokens", "time"] | None,
    against: Literal["bytes", "time"] | None,
) -> None:
    """Draw loss, learning rate, throughput and gradient norm of one or more runs.

    Writes PNG files to DIR (default: plots/ in the run directory, or in the current directory for several
    runs, which are drawn over one another) and prints their paths. Of a run with mixtures of experts it also
    draws their load by block and step, of one with precision.fp8_watch what products in 8 bits lose, and of
    one with run.noise_scale_steps the gradient noise scale. Of a run with pipeline stages and
    run.trace = true, it also draws the schedule as it ran, and as simulated from the measured times, with
    both bubbles. Marks below loss and gradient norm tell where a run went on from a checkpoint, left a step
    out, went back before a spike, or met a silent fault.
    """
    from hpctrain.report.against import plot_against
    from hpctrain.report.plots import plot_runs

    if against is not None:
        if axis is not None:
            raise click.UsageError("--x and --against both say what is drawn over: leave one out")
        click.echo(plot_against(against, run_dirs, out, log_loss=log_loss))
        return
    for path in plot_runs(run_dirs, out, log_loss=log_loss, axis=axis or "steps"):
        click.echo(path)
