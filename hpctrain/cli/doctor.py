"""`hpctrain doctor`: what is here, and what is wrong with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.report.terminal import coloured, columns, fit
from hpctrain.table import table
from hpctrain.words import ranges

if TYPE_CHECKING:
    from hpctrain.comm.doctor import RankReport, Report

MOST_RANKS = 64
COLOURS = {"WRONG": "red", "note": "yellow", "ok": "green"}


@click.command(name="doctor")
@click.option(
    "--deck", type=click.Path(path_type=Path), metavar="DECK", help="Map its layout onto the ranks."
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of it, e.g. layout.tensor=2."
)
def command(deck: Path | None, overrides: tuple[str, ...]) -> None:
    """Tell what a run would find here, alone or under mpirun or srun, and what to do about what is wrong.

    With --deck, it is told where on the mesh each rank would be. Exits with 1 if a run could not start.
    """
    from hpctrain.comm.doctor import examination

    with examination() as report:
        if report.fit:  # else torch may be what is broken
            from hpctrain.parallel.found_kernels import found_kernels
            from hpctrain.parallel.fp8.found import found_products

            local_rank = report.ranks[report.rank].local_rank
            report.add([found_kernels(local_rank), found_products(local_rank)])
        if deck is not None and report.fit:  # else what reads decks may be what is broken
            from hpctrain.plan.coordinates import map_deck

            map_deck(report, deck, overrides)
        if report.rank == 0:
            show(report)
    sys.exit(0 if report.fit else 1)


def show(report: Report) -> None:
    """Print tables of the findings and of the ranks, then one line for each thing that is wrong."""
    marks = ["WRONG" if finding.fatal else "note" if finding.remedy else "ok" for finding in report.findings]
    rows = [
        (mark, finding.topic, finding.statement) for mark, finding in zip(marks, report.findings, strict=True)
    ]
    width = columns()
    axes = list(report.coordinates[0]) if report.coordinates else []
    ranks = [
        (
            *(str(rank.rank), rank.hostname, str(rank.local_rank), spans(rank.cores), gpu(rank)),
            *(str(report.coordinates[rank.rank][axis]) for axis in axes),
        )
        for rank in report.ranks[:MOST_RANKS]
    ]
    heads = ("rank", "node", "local rank", "cores", "GPU", *axes)
    for cells in ([("", "topic", "found"), *rows], [heads, *ranks]):
        for line in [*table(cells, range(len(cells[0]))), ""]:
            mark = line.partition(" ")[0]
            shown = click.style(mark, COLOURS.get(mark), bold=mark == "WRONG")
            text = "\n".join(fit(line, width)).removeprefix(mark)
            click.echo((shown if mark in COLOURS else mark) + text, color=coloured())
    if len(report.ranks) > MOST_RANKS:
        click.echo(f"and {len(report.ranks) - MOST_RANKS} more ranks")
    for mark, finding in zip(marks, report.findings, strict=True):
        if finding.remedy:
            sentence = f"{mark}: {finding.topic}: {finding.statement}. What to do: {finding.remedy}."
            click.echo("\n".join(fit(sentence, width)))
    click.echo("A run can start here." if report.fit else "A run could not start here.")


def gpu(rank: RankReport) -> str:
    """The GPU that a run gives to this rank, and how many it sees."""
    return f"{rank.local_rank % rank.gpus} of {rank.gpus}" if rank.gpus else "none"


def spans(cores: tuple[int, ...]) -> str:
    """Numbers with runs joined: (0, 1, 2, 5) is "0-2,5"."""
    return ranges(cores, ",") or "unknown"
