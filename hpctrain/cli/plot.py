"""`hpctrain plot RUN_DIR...`: plot the metrics of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from hpctrain.cli.shared_options import PATH


@click.command(name="plot")
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True, type=PATH)
@click.option(
    "--out",
    metavar="DIR",
    type=PATH,
    help="Folder for the plots.  [default: plots/ in the run folder]",
)
@click.option("--log-loss", is_flag=True, help="Use a logarithmic scale for the loss.")
@click.option(
    "--x",
    "axis",
    type=click.Choice(["steps", "tokens", "time"]),
    help="Horizontal axis: steps, trained tokens, or time.  [default: steps]",
)
@click.option(
    "--against",
    type=click.Choice(["bytes", "time"]),
    help="Plot only the loss, against bytes sent or time. Deck keys that differ label the runs.",
)
def command(
    run_dirs: tuple[Path, ...],
    out: Path | None,
    log_loss: bool,
    axis: Literal["steps", "tokens", "time"] | None,
    against: Literal["bytes", "time"] | None,
) -> None:
    """Plot loss, learning rate, throughput and gradient norm of one or more runs.

    PNG files are written to DIR, and their paths are printed. Several runs share the axes; their default
    folder is plots/ in the current folder. Marks below loss and gradient norm show where a run was resumed,
    skipped an update, returned to an earlier state after a spike, or had a silent fault.

    Further plots are made of runs with mixtures of experts (load by block and step), with
    precision.fp8_watch (error of products in 8 bits), with run.noise_scale_steps (gradient noise scale), and
    with pipeline stages and run.trace = true (measured and simulated schedule, with their bubbles).
    """
    from hpctrain.report.against import plot_against
    from hpctrain.report.plots import plot_runs

    if against is not None:
        if axis is not None:
            raise click.UsageError("--x conflicts with --against")
        click.echo(plot_against(against, run_dirs, out, log_loss=log_loss))
        return
    for path in plot_runs(run_dirs, out, log_loss=log_loss, axis=axis or "steps"):
        click.echo(path)
