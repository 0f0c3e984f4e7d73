"""`hpctrain status`: show the progress of runs."""

from __future__ import annotations

import os
from pathlib import Path

import click

from hpctrain.cli.shared_options import PATH


@click.command(name="status")
@click.argument("run_dirs", metavar="[RUN_DIR...]", nargs=-1, type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print the result as a JSON list.")
@click.option("--faulty", is_flag=True, help="Print only the names of nodes with repeated silent faults.")
@click.option("--watch", "watches", is_flag=True, help="Update the table continuously until Ctrl-C.")
def command(run_dirs: tuple[Path, ...], as_json: bool, faulty: bool, watches: bool) -> int:
    """Show the state, progress and last step of runs. The default is all runs below the current folder.

    "stalled" means that no step has ended for a long time, and "lost" that the job has ended without writing
    its state. For runs that ended early, the command that resumes them is shown. Only run folders are read,
    so this works on any node that can read them. --watch requires a terminal; otherwise the table is printed
    once.
    """
    from hpctrain.host.launcher import launched_rank
    from hpctrain.report.terminal import can_be_drawn_on
    from hpctrain.watch.run_search import runs_below
    from hpctrain.watch.statuses import show_faulty, show_statuses

    if sum((watches, as_json, faulty)) > 1:
        raise click.UsageError("--watch, --faulty and --json conflict with each other")
    first = launched_rank(os.environ) == 0
    if watches and first and can_be_drawn_on():
        from hpctrain.watch.live import watch_runs

        return watch_runs(run_dirs)
    show = click.echo if first else lambda _: None
    folders = run_dirs or runs_below(Path())
    return show_faulty(folders, show) if faulty else show_statuses(folders, as_json, show)
