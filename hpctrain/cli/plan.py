"""`hpctrain plan`: what a deck will hold on every rank, before any rank starts."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(name="plan")
@click.argument("deck", type=click.Path(path_type=Path))
@click.option(
    "--ranks", type=click.IntRange(1, 1 << 20), required=True, metavar="N", help="Ranks of the run."
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
    help="Also a step's seconds there: a published machine, or a file of `hpctrain calibrate`.",
)
@click.option("--forms", is_flag=True, help="Also every other form of communication that DECK could have.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(
    deck: Path,
    ranks: int,
    overrides: tuple[str, ...],
    ranks_per_node: int | None,
    link: str | None,
    step_seconds: str | None,
    like: Path | None,
    machine: str | None,
    forms: bool,
    as_json: bool,
) -> None:
    """Tell from DECK alone what each of N ranks will hold: bytes by kind, where most go, what would save.

    And whether the ranks of a node fit into its memory: machine.memory of the deck (on GPUs
    machine.gpu_memory), or where that is not given the memory of this machine. Then what a rank sends in a
    step, by axis, beside what it would send by exact sums; over a slow link also how long a step takes with
    both, and at which speed of links they break even. With --machine also the seconds of a step by cause: of
    selene-2021, selene-2022, megascale-2024 or megatron-deepspeed-a100, or of a file that
    `hpctrain calibrate` has written.
    """
    from hpctrain.plan.deck import plan_deck
    from hpctrain.plan.forms import wished_link
    from hpctrain.plan.time.machine import read_machine
    from hpctrain.plan.words import plan_text

    wish = wished_link(link, step_seconds, like)
    rates = read_machine(machine) if machine is not None else None
    plan = plan_deck(deck, ranks, overrides, ranks_per_node, not as_json, wish, forms, rates)
    click.echo(json.dumps(plan.row(), indent=1) if as_json else plan_text(plan), nl=as_json)
