"""`hpctrain report RUN...`: make an HTML page about runs."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="report")
@click.argument("run_dirs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="The page to be written; one that was written so before is replaced.",
)
@click.option("--force", is_flag=True, help="Replace FILE even where it is no report.")
def command(run_dirs: tuple[Path, ...], output: Path, force: bool) -> None:
    """Write one HTML file that tells of one or more runs, and asks no other machine for anything.

    It holds curves, over steps, tokens or time, smoothed as one likes, with marks where a run went on, went
    back, left a step out or met a fault; events; keys in which decks differ; what was predicted beside what
    was measured; a pipeline's schedule and the balance of its stages; checkpoints; and the environment.
    RUN is a run's folder; it is read, nothing else.
    """
    from hpctrain.units import format_bytes
    from hpctrain.watch.told import write_report

    size = write_report(run_dirs, output, force=force)
    click.echo(f"{output}  {format_bytes(size)}")
