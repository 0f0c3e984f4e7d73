"""`hpctrain report RUN...`: make an HTML page about runs."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.shared_options import PATH


@click.command(name="report")
@click.argument("run_dirs", metavar="RUN...", nargs=-1, required=True, type=PATH)
@click.option(
    "--output",
    metavar="FILE",
    type=PATH,
    default=Path("report.html"),
    show_default=True,
    help="HTML file to write. An earlier report is replaced.",
)
@click.option("--force", is_flag=True, help="Replace FILE even if it is not a report.")
def command(run_dirs: tuple[Path, ...], output: Path, force: bool) -> None:
    """Write an HTML report about one or more runs. It is one file and needs no network.

    RUN is a run folder, which is only read. The report has curves over steps, tokens or time with adjustable
    smoothing and with marks where a run was resumed, returned to an earlier state, skipped an update or had a
    fault. It lists events, deck keys that differ, predicted and measured values, checkpoints and the
    environment. For a pipeline, it shows the schedule and the balance of its stages.
    """
    from hpctrain.units import format_bytes
    from hpctrain.watch.run_report import write_report

    size = write_report(run_dirs, output, force=force)
    click.echo(f"{output}  {format_bytes(size)}")
