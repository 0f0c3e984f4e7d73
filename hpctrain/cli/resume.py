"""`hpctrain resume`: continue a run."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.code_options import ReadTrust, add_trust, code_options
from hpctrain.train.signals import heed_from_now


@click.command(name="resume")
@click.argument("target", metavar="RUN_DIR|CHECKPOINT", type=click.Path(path_type=Path))
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key, e.g. run.steps=200."
)
@click.option(
    "--replay-routing",
    "replayed",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Tokens go to the experts that FILE names, a routing.h5 (model.experts.record_routing).",
)
@click.option("--strict", is_flag=True, help="Refuse a run folder whose newest checkpoint is damaged.")
@code_options
def command(
    target: Path, overrides: tuple[str, ...], strict: bool, replayed: Path | None, trust: ReadTrust
) -> None:
    """Go on from a checkpoint, or from the newest good one of a run folder.

    The deck is the one stored in the checkpoint, on any number of ranks that its layout fits.
    """
    heed_from_now()
    from hpctrain.comm.verb import run_verb
    from hpctrain.comm.world import World
    from hpctrain.post.trainer import make_trainer
    from hpctrain.train.run import resume

    def work(world: World) -> int:
        changes = add_trust(world, overrides, trust)
        return resume(world, target, changes, strict, replayed, make_trainer)

    run_verb(work)
