"""`hpctrain plan`: predict memory, traffic and time of a deck before any rank starts."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(name="plan")
@click.argument("deck", type=click.Path(path_type=Path))
@click.option(
    "--ranks", type=click.IntRange(1, 1 << 20), metavar="N", help="Ranks of the run; or --sweep ranks=N,N."
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key, e.g. layout.zero=3."
)
@click.option(
    "--ranks-per-node",
    type=click.IntRange(min=1),
    metavar="N",
    help="Ranks of a node.  [default: communication.ranks_per_node, else those of [machine], else all]",
)
@click.option(
    "--link",
    metavar='"100 Mbit/s, 20 ms"',
    help="Also the seconds of a step over such a link of each rank.  [default: communication.emulate]",
)
@click.option("--step-seconds", metavar="T", help='So long a step takes without it, such as "350 ms".')
@click.option(
    "--like", type=click.Path(path_type=Path), metavar="RUN_DIR", help="A step takes as in that run, instead."
)
@click.option(
    "--machine",
    metavar="NAME|FILE",
    help="Also a step's seconds there: a published machine, or a file of one.  [default: machine.rates]",
)
@click.option("--forms", is_flag=True, help="Also every other form of communication that DECK could have.")
@click.option("--search", is_flag=True, help="The ten quickest layouts that fit, of all that DECK can have.")
@click.option(
    "--all-schedules", is_flag=True, help="Search V-Half and V-Min too, whose orders take long to find."
)
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the deck with the quickest of them there.",
)
@click.option("--force", is_flag=True, help="Replace FILE where it exists.")
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    metavar="KEY=V,V,...",
    help="A table over the values of a key of DECK, or of ranks; of several keys over all combinations.",
)
@click.option("--weak", is_flag=True, help="As ranks are swept, batch.global_size grows with them.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw a sweep's seconds by cause, or a search's memory against time, as .png, .svg or .pdf.",
)
@click.option("--pareto", is_flag=True, help="Draw memory against time instead.")
@click.option("--rehearse", is_flag=True, help="Also every message of a step of all ranks, made and matched.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(
    deck: Path,
    ranks: int | None,
    overrides: tuple[str, ...],
    ranks_per_node: int | None,
    link: str | None,
    step_seconds: str | None,
    like: Path | None,
    machine: str | None,
    forms: bool,
    search: bool,
    all_schedules: bool,
    write: Path | None,
    force: bool,
    sweeps: tuple[str, ...],
    weak: bool,
    plot: Path | None,
    pareto: bool,
    rehearse: bool,
    as_json: bool,
) -> None:
    """Tell from DECK alone what each of N ranks will hold: bytes by kind, where most go, what would save.

    And whether the ranks of a node fit into its memory: machine.memory of the deck (on GPUs
    machine.gpu_memory), or where that is not given the memory of this machine. Then what a rank sends in a
    step, by axis, beside what it would send by exact sums; over a slow link also how long a step takes with
    both, and at which speed of links they break even. With --machine, one of a publication or a file that
    hpctrain calibrate measures, also the seconds of a step by cause, what limits it, and which single change
    would help most. With --sweep a table, a row for each value.

    With --search the ten quickest layouts that fit: over tensor, sequence, context, pipeline and expert
    ranks, schedule, chunks, micro-batch, ZeRO, recomputation and offload. Keys that DECK gives stay as they
    are (--set layout.tensor= opens one); a deck with layout = "auto" is run with the quickest.

    With --rehearse every rank's programme of one step is made and matched with all others: no message without
    its other end, of another size or in another order, nobody waiting in a circle, memory never over. The
    exit code is 2 where memory does not do, and 70 where programmes do not fit each other.
    """
    from hpctrain.plan.deck import plan_deck
    from hpctrain.plan.forms import wished_link
    from hpctrain.plan.options import require_fitting, required_ranks
    from hpctrain.plan.rehearse.rehearsal import rehearsal_text, rehearse_deck
    from hpctrain.plan.search.deck import SearchOptions
    from hpctrain.plan.search.options import searched
    from hpctrain.plan.sweep_options import swept
    from hpctrain.plan.time.machine_rates import read_machine
    from hpctrain.plan.words import plan_text
    from hpctrain.report.terminal import stderr_console

    require_fitting(written_options(click.get_current_context()))
    wish = wished_link(link, step_seconds, like)
    rates = read_machine(machine) if machine is not None else None
    if sweeps:
        told = swept(deck, ranks, overrides, sweeps, ranks_per_node, rates, weak, plot, pareto, as_json)
        click.echo(told, nl=as_json)
        return
    if search:
        wished = SearchOptions(ranks_per_node, rates, all_schedules)
        told = searched(deck, ranks, overrides, wished, write, as_json, force=force, plot=plot)
        click.echo(told, nl=as_json)
        return
    plan = plan_deck(deck, required_ranks(ranks), overrides, ranks_per_node, not as_json, wish, forms, rates)
    if not rehearse:
        click.echo(json.dumps(plan.row(), indent=1) if as_json else plan_text(plan), nl=as_json)
        return
    if not as_json:
        click.echo(plan_text(plan))
    with stderr_console().status("rehearsing") as status:
        rehearsal = rehearse_deck(plan, ranks_per_node, status.update)
    row = plan.row() | {"rehearsal": rehearsal.row()}
    click.echo(json.dumps(row, indent=1) if as_json else rehearsal_text(rehearsal), nl=as_json)
    click.get_current_context().exit(rehearsal.exit_code)


def written_options(context: click.Context) -> list[str]:
    """Return the names of the options that the user wrote in the command line."""
    line = click.core.ParameterSource.COMMANDLINE
    every = context.command.params
    return [each.opts[0] for each in every if context.get_parameter_source(each.name) is line]
