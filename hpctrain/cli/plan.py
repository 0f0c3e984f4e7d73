"""`hpctrain plan`: predict memory, traffic and time of a deck before any rank starts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.shared_options import PATH, set_option

if TYPE_CHECKING:
    from hpctrain.plan.time.machine_rates import MachineRates


@click.command(name="plan")
@click.argument("deck", type=PATH)
@click.option(
    "--ranks",
    type=click.IntRange(1, 1 << 20),
    metavar="N",
    help="Number of ranks. (Alternative: --sweep ranks=N,N,...)",
)
@set_option("layout.zero=3")
@click.option(
    "--ranks-per-node",
    type=click.IntRange(min=1),
    metavar="N",
    help="Ranks per node.  [default: communication.ranks_per_node, else that of [machine], else all]",
)
@click.option(
    "--link",
    metavar='"100 Mbit/s, 20 ms"',
    help="Also predict the step time over such a link of each rank.  [default: communication.emulate]",
)
@click.option("--step-seconds", metavar="T", help='Step time without the link, e.g. "350 ms".')
@click.option(
    "--like",
    type=PATH,
    metavar="RUN_DIR",
    help="Take the step time without the link from this run.",
)
@click.option(
    "--machine",
    metavar="NAME|FILE",
    help="Also predict the step time on a published machine, or one measured by `hpctrain calibrate`.  "
    "[default: machine.rates]",
)
@click.option("--forms", is_flag=True, help="Also compare all forms of communication that DECK could use.")
@click.option("--search", is_flag=True, help="List the ten fastest layouts of DECK that fit into memory.")
@click.option(
    "--all-schedules", is_flag=True, help="Also search the schedules V-Half and V-Min, which takes longer."
)
@click.option(
    "--write",
    type=PATH,
    metavar="FILE",
    help="Write the deck with the fastest layout of --search to FILE.",
)
@click.option("--force", is_flag=True, help="Replace an existing FILE of --write.")
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    metavar="KEY=V,V,...",
    help="Print a table over values of a key of DECK, or of ranks. May be repeated for all combinations.",
)
@click.option("--weak", is_flag=True, help="Weak scaling: let batch.global_size grow with the swept ranks.")
@click.option(
    "--plot",
    type=PATH,
    metavar="FILE",
    help="Plot the time by cause (--sweep) or memory against time (--search) as .png, .svg or .pdf.",
)
@click.option("--pareto", is_flag=True, help="Plot memory against time also for --sweep.")
@click.option(
    "--rehearse",
    is_flag=True,
    help="Also match every message that all ranks send in a step, to find deadlocks.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(**values: Any) -> None:
    """Predict the memory, traffic and time of DECK on N ranks. No rank is started.

    The plan lists the memory of each rank by kind, and says whether the ranks of a node fit into its memory:
    machine.memory of the deck (for GPUs machine.gpu_memory), by default the memory of this machine. It then
    lists the bytes that a rank sends per step and axis. With compressed communication, these are compared
    with exact sums. With --link, the step time over a slow link is predicted too. The exit code is 2 if
    memory does not suffice, as that of a run.

    With --machine, the plan lists the step time by cause, what limits it, and which single change would save
    most. With --sweep, it is a table with one row per value; the exit code is then 0 even if no row fits.

    With --search, the ten fastest layouts that fit are listed. The search varies tensor, sequence, context,
    pipeline and expert parallelism, schedule, chunks, micro-batch size, ZeRO, recomputation and offload. Keys
    that are set in DECK stay fixed (--set layout.tensor= releases one). A deck with layout = "auto" is
    trained with the fastest layout.

    With --rehearse, the messages of one step of all ranks are computed and matched: each message must have a
    sender and a receiver with the same size and order, no ranks may wait for each other in a cycle, and
    memory must suffice. The exit code is 70 if messages do not match. With run.device = "cuda", the rules are
    those of NCCL: messages have no tags, and each communicator runs its calls in order on a stream.
    """
    from hpctrain.plan.option_conflicts import require_fitting

    context = click.get_current_context()
    require_fitting(written_options(context))
    arguments = PlanArguments(**values)
    if arguments.sweeps:
        click.echo(sweep_text(arguments), nl=arguments.as_json)
    elif arguments.search:
        click.echo(search_text(arguments), nl=arguments.as_json)
    else:
        context.exit(show_plan(arguments))


@dataclass(frozen=True)
class PlanArguments:
    """Arguments of the command line, as the help of the command describes them."""

    deck: Path
    ranks: int | None
    overrides: tuple[str, ...]
    ranks_per_node: int | None
    link: str | None
    step_seconds: str | None
    like: Path | None
    machine: str | None
    forms: bool
    search: bool
    all_schedules: bool
    write: Path | None
    force: bool
    sweeps: tuple[str, ...]
    weak: bool
    plot: Path | None
    pareto: bool
    rehearse: bool
    as_json: bool

    @property
    def machine_rates(self) -> MachineRates | None:
        """Rates of the machine that the user names; None if there is none."""
        from hpctrain.plan.time.machine_rates import read_machine

        return None if self.machine is None else read_machine(self.machine)


def sweep_text(arguments: PlanArguments) -> str:
    """Return the table of --sweep, or its JSON."""
    from hpctrain.plan.planned_sweep import SweepOptions
    from hpctrain.plan.sweep_output import OutputOptions, sweep_output

    options = SweepOptions(arguments.ranks_per_node, arguments.machine_rates, arguments.weak)
    output = OutputOptions(arguments.plot, arguments.pareto, arguments.as_json)
    return sweep_output(
        arguments.deck, arguments.ranks, arguments.overrides, arguments.sweeps, options, output
    )


def search_text(arguments: PlanArguments) -> str:
    """Return the table of --search, or its JSON, and write the deck of --write."""
    from hpctrain.plan.search.deck_search import SearchOptions
    from hpctrain.plan.search.search_output import SearchFiles, search_output

    options = SearchOptions(arguments.ranks_per_node, arguments.machine_rates, arguments.all_schedules)
    files = SearchFiles(arguments.write, arguments.force, arguments.plot, arguments.as_json)
    return search_output(arguments.deck, arguments.ranks, arguments.overrides, options, files)


def show_plan(arguments: PlanArguments) -> int:
    """Print the plan of one deck, with --rehearse also the rehearsal. Return the exit code."""
    from hpctrain.plan.deck_plan import PlanOptions, plan_deck
    from hpctrain.plan.forms import parse_planned_link
    from hpctrain.plan.option_conflicts import required_ranks
    from hpctrain.plan.plan_text import plan_text
    from hpctrain.plan.rehearse.rehearsal import rehearsal_text, rehearse_deck
    from hpctrain.report.terminal import stderr_console

    as_json, ranks_per_node = arguments.as_json, arguments.ranks_per_node
    link = parse_planned_link(arguments.link, arguments.step_seconds, arguments.like)
    options = PlanOptions(ranks_per_node, not as_json, arguments.forms, link, arguments.machine_rates)
    plan = plan_deck(arguments.deck, required_ranks(arguments.ranks), arguments.overrides, options)
    if not arguments.rehearse:
        click.echo(json.dumps(plan.row(), indent=1) if as_json else plan_text(plan), nl=as_json)
        return plan.exit_code
    if not as_json:
        click.echo(plan_text(plan))
    with stderr_console().status("rehearsing") as status:
        rehearsal = rehearse_deck(plan, ranks_per_node, status.update)
    row = plan.row() | {"rehearsal": rehearsal.row()}
    click.echo(json.dumps(row, indent=1) if as_json else rehearsal_text(rehearsal), nl=as_json)
    return rehearsal.exit_code


def written_options(context: click.Context) -> list[str]:
    """Return the names of the options that the user wrote in the command line."""
    line = click.core.ParameterSource.COMMANDLINE
    every = context.command.params
    return [each.opts[0] for each in every if context.get_parameter_source(each.name) is line]
