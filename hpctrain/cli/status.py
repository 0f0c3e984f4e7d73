"""`hpctrain status`: where runs stand."""

from __future__ import annotations

import os
from pathlib import Path

import click


@click.command(name="status")
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print everything as a JSON list.")
@click.option("--faulty", is_flag=True, help="Print the nodes that had silent faults again and again, alone.")
def command(run_dirs: tuple[Path, ...], as_json: bool, faulty: bool) -> int:
    """Tell of one or more runs what they do, how far they are and when their last step ended.

    Besides what runs say of themselves, "stalled" means that no step has ended for long, and "lost" that the
    job is gone without a word. Of runs that ended early, the command is told that goes on with them. Run
    folders are read, nothing else: any node that sees them will do.
    """
    from hpctrain.comm.launcher import started_rank
    from hpctrain.watch.statuses import show_faulty, show_statuses

    if as_json and faulty:
        raise click.UsageError("--faulty prints names for scripts, and --json everything: give one of them.")
    show = click.echo if started_rank(os.environ) == 0 else lambda _: None
    return show_faulty(run_dirs, show) if faulty else show_statuses(run_dirs, as_json, show)
