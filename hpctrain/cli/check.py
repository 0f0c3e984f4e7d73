"""`hpctrain check`: compare a layout with one rank."""

from __future__ import annotations

import os
from pathlib import Path

import click

from hpctrain.cli.shared_options import PATH, set_option


@click.command(name="check")
@click.argument("deck", type=PATH)
@set_option()
@click.option(
    "--ranks",
    type=click.IntRange(1, 1 << 12),
    metavar="N",
    help="Start N ranks on this machine.  [default: the ranks of mpirun or srun]",
)
@click.option(
    "--communication",
    is_flag=True,
    help="Rehearse the calls of --ranks N on GPUs by NCCL's rules, without starting ranks.",
)
def command(deck: Path, overrides: tuple[str, ...], ranks: int | None, communication: bool) -> None:
    """Check that the layout of DECK computes the same as one rank. Neither training nor tokens are needed.

    Two steps of a small version of the model run on all ranks and on one rank. Initial parameters, losses,
    gradients, norms, updated parameters and all other state are compared. For each tensor that differs, the
    difference, the partition of the tensor and a missing or duplicate reduction that explains it are shown.
    The exit code is then 1.

    A module of your own is also compared in fp64 with its code in plain PyTorch, with the arguments in
    [model.miniature] if there are any. State, random numbers and losses that depend on the number of ranks
    are found too.

    With --communication, the messages and collective calls of one step on GPUs are matched instead, by the
    rules of NCCL: messages have no tags, and each communicator runs its calls in order on a stream. The exit
    code is 70 if a call would hang.
    """
    if communication:
        from hpctrain.host.launcher import launched_rank, launched_size
        from hpctrain.plan.deck_plan import PlanOptions, plan_deck
        from hpctrain.plan.option_conflicts import required_ranks
        from hpctrain.plan.rehearse.rehearsal import rehearsal_text, rehearse_deck

        if ranks is None and launched_size(os.environ) > 1:
            ranks = launched_size(os.environ)
        on_gpus = "run.device=cuda", "communication.transport=auto", "machine.compile=auto"
        plan = plan_deck(deck, required_ranks(ranks), (*overrides, *on_gpus), PlanOptions(with_savings=False))
        rehearsal = rehearse_deck(plan)
        if launched_rank(os.environ) == 0:
            click.echo(rehearsal_text(rehearsal), nl=False)
        click.get_current_context().exit(rehearsal.exit_code)
    from hpctrain.comm.verb import run_verb
    from hpctrain.host.commands import restart_on_ranks
    from hpctrain.train.layout_check import check

    restart_on_ranks(ranks)
    run_verb(lambda world: check(world, deck, overrides, click.echo))
