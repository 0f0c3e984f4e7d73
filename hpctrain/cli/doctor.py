"""`hpctrain doctor`: examine the machine, and report what is wrong with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.shared_options import PATH, set_option
from hpctrain.errors import HpctrainError
from hpctrain.report.terminal import coloured, columns, fit
from hpctrain.text import fitted, ranges, table
from hpctrain.watch.stress.stress_options import StressOptions

if TYPE_CHECKING:
    from hpctrain.comm.world import World
    from hpctrain.host.doctor import DoctorFinding, DoctorReport, RankPlacement

MAX_RANKS = 64
"""Largest number of ranks that the table lists."""

COLOURS = {"WRONG": "red", "note": "yellow", "ok": "green"}


@click.command(name="doctor")
@click.option(
    "--deck",
    type=PATH,
    metavar="DECK",
    help="Also show the mesh coordinates of each rank for the layout of DECK.",
)
@set_option(key="a key of DECK")
@click.option("--stress", metavar="SECONDS", help="Also test the nodes for this time, e.g. 60 or '10 min'.")
@click.option(
    "--stress-dir",
    type=PATH,
    metavar="FOLDER",
    help="Folder on the disk that --stress tests.  [default: the current folder]",
)
@click.option(
    "--rates",
    type=PATH,
    metavar="FILE",
    help="File for the node rates that --stress measures.  [default: node-rates.jsonl in the user's cache]",
)
@click.option(
    "--report",
    "report_path",
    type=PATH,
    metavar="FILE",
    help="Also write the findings, packages, libraries and MPI variables to FILE, for a bug report.",
)
def command(
    deck: Path | None,
    overrides: tuple[str, ...],
    stress: str | None,
    stress_dir: Path | None,
    rates: Path | None,
    report_path: Path | None,
) -> None:
    """Check whether a run can start on this machine, as one process or under mpirun or srun.

    Each problem is listed with its remedy.

    With --stress, all ranks then compute, fill memory, send messages and write files for the given time, and
    check every result. Start one rank per core or GPU. Wrong results are listed with their location. A node
    is reported as slow if it is below the median of the nodes, or below its earlier rate, by 15% (matrix
    products, memory), 30% (messages) or 50% (disk).

    The exit code is 1 if a run cannot start or a result was wrong. Slow nodes do not change it.
    """
    for option, value in (("--stress-dir", stress_dir), ("--rates", rates)):
        if value is not None and stress is None:
            raise HpctrainError(f"{option} requires --stress SECONDS")
    stress_options = None if stress is None else StressOptions.of(stress, stress_dir, rates)
    from hpctrain.host.doctor import examine_machine
    from hpctrain.host.problem_report import problem_report

    with examine_machine() as report:
        if report.can_run:  # otherwise the import of torch may fail
            from hpctrain.comm.transports.node_memory import examine_node_memory
            from hpctrain.host.device import choose_device, visible_gpus
            from hpctrain.parallel.product_findings import check_fp8_products, check_kernels

            device = choose_device("auto", report.ranks[report.rank].local_rank, visible_gpus())
            findings = [] if report.world is None else examine_node_memory(report.world)
            report.add([*findings, check_kernels(device), check_fp8_products(device)])
        if deck is not None and report.can_run:  # otherwise the reader of decks may fail
            from hpctrain.plan.coordinates import map_deck

            map_deck(report, deck, overrides)
        if report.rank == 0:
            click.echo(findings_text(report, columns()), color=coloured())
            if report_path is not None:
                text = click.unstyle(findings_text(report, None))
                report_path.write_text(problem_report(text, os.environ), encoding="utf-8")
                click.echo(
                    f"{report_path}: read it before you send it: it names this machine's paths and nodes"
                )
        if stress_options is not None and report.can_run:
            from hpctrain.comm.verb import run_verb

            run_verb(lambda world: test_nodes(world, stress_options))
    sys.exit(0 if report.can_run else 1)


def test_nodes(world: World, options: StressOptions) -> int:
    """Test the nodes, print their table and all problems, and return the exit code. Collective."""
    from hpctrain.watch.stress.stress import stress

    def say(line: str) -> None:
        click.echo("\n".join(fit(line, columns())))

    result = stress(world, options, say)
    if world.rank == 0:
        click.echo("\n".join(["", *fitted(result.rows, range(len(result.rows[0])), columns()), ""]))
        click.echo("".join(f"{line}\n" for line in problem_lines(result.findings, columns())), nl=False)
        say(result.sentence)
    return result.code


def findings_text(report: DoctorReport, width: int | None) -> str:
    """Return tables of the findings and of the ranks, then one sentence for each problem, with ANSI styles.

    Args:
        report: Findings on the machine.
        width: Columns at which lines are broken; None if lines may have any length.
    """
    marks = ["WRONG" if finding.fatal else "note" if finding.remedy else "ok" for finding in report.findings]
    rows = [
        (mark, finding.topic, finding.statement) for mark, finding in zip(marks, report.findings, strict=True)
    ]
    axes = list(report.coordinates[0]) if report.coordinates else []
    ranks = [
        (
            *(str(rank.rank), rank.hostname, str(rank.local_rank), spans(rank.cores), gpu(rank)),
            *(str(report.coordinates[rank.rank][axis]) for axis in axes),
        )
        for rank in report.ranks[:MAX_RANKS]
    ]
    heads = ("rank", "node", "local rank", "cores", "GPU", *axes)
    lines = []
    for cells in ([("", "check", "result"), *rows], [heads, *ranks]):
        for line in [*table(cells, range(len(cells[0]))), ""]:
            mark = line.partition(" ")[0]
            styled = click.style(mark, COLOURS.get(mark), bold=mark == "WRONG")
            text = "\n".join(fit(line, width)).removeprefix(mark)
            lines.append((styled if mark in COLOURS else mark) + text)
    if len(report.ranks) > MAX_RANKS:
        lines.append(f"and {len(report.ranks) - MAX_RANKS} more ranks")
    lines += problem_lines([finding for finding in report.findings if finding.remedy], width)
    lines.append("A run can start here." if report.can_run else "A run could not start here.")
    return "\n".join(lines)


def problem_lines(findings: list[DoctorFinding], width: int | None) -> Iterator[str]:
    """Yield one sentence for each finding, with its remedy, broken into lines of at most `width` columns."""
    for finding in findings:
        mark = "WRONG" if finding.fatal else "note"
        remedy = f" What to do: {finding.remedy}." if finding.remedy else ""
        yield from fit(f"{mark}: {finding.topic}: {finding.statement}.{remedy}", width)


def gpu(rank: RankPlacement) -> str:
    """Return the GPU that a run gives to this rank: its number, how many it sees, and the start of its UUID.

    The UUID tells GPUs apart if each rank sees one GPU, which has the number 0: "0 of 1 (8a3f02c1)".
    """
    if rank.gpu is None:
        return "none"
    return f"{rank.gpus.index(rank.gpu)} of {len(rank.gpus)} ({rank.gpu[:8]})"


def spans(cores: tuple[int, ...]) -> str:
    """Return the numbers with consecutive ones as ranges: "0-2,5" for (0, 1, 2, 5)."""
    return ranges(cores, ",") or "unknown"
