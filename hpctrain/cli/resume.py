"""`hpctrain resume`: continue a run."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.code_options import ReadTrust, add_trust, code_options
from hpctrain.cli.shared_options import PATH, set_option
from hpctrain.train.signals import record_signals


@click.command(name="resume")
@click.argument("target", metavar="RUN_DIR|CHECKPOINT", type=PATH)
@set_option("run.steps=200")
@click.option(
    "--replay-routing",
    "routing_file",
    metavar="FILE",
    type=PATH,
    help="Send tokens to the experts recorded in FILE, a routing.h5 (model.experts.record_routing).",
)
@click.option("--strict", is_flag=True, help="Fail if the newest checkpoint of a run folder is damaged.")
@code_options
def command(
    target: Path, overrides: tuple[str, ...], strict: bool, routing_file: Path | None, trust: ReadTrust
) -> None:
    """Continue a run from a checkpoint, or from the newest valid checkpoint of a run folder.

    The deck is read from the checkpoint. The number of ranks may differ from that of the earlier run if the
    layout fits it.
    """
    record_signals()
    from hpctrain.comm.verb import run_verb
    from hpctrain.comm.world import World
    from hpctrain.post.policy_trainer import make_trainer
    from hpctrain.train.run import resume

    def work(world: World) -> int:
        changes = add_trust(world, overrides, trust)
        return resume(world, target, changes, strict, routing_file, make_trainer)

    run_verb(work)
