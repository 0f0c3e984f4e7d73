"""Checkpoint that a user means by a run folder."""

from __future__ import annotations

import logging
from pathlib import Path

from hpctrain.checkpoint.retention import newest_valid
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError, InputOutputError, require_exists
from hpctrain.watch.folder import explain_no_checkpoint


def find_checkpoint(world: World, target: Path, strict: bool = False) -> Path:
    """Return the checkpoint that a user means by a file or by a run folder. Collective.

    Args:
        world: The ranks.
        target: A checkpoint, or a run folder, which stands for its newest good checkpoint.
        strict: True if the newest checkpoint of a run folder must be good.

    Raises:
        HpctrainError: The target does not exist or is a deck.
        InputOutputError: The run folder has no good checkpoint.
    """
    world.ledger.activity = "looking for a checkpoint"
    with world.agreement():
        require_exists(target, "run folder or checkpoint")
        if target.suffix == ".toml" and target.is_file():
            raise HpctrainError(
                f"{target}: is a deck; name a checkpoint, or the folder of its run (default: runs/TITLE)"
            )
    if not target.is_dir():
        return target
    path, warnings = newest_valid(target / "checkpoints", world.everyone, strict=strict)
    for warning in warnings if world.rank == 0 else ():
        logging.getLogger("hpctrain").warning("%s", warning)
    with world.agreement():
        if path is None and world.rank == 0:
            raise InputOutputError(explain_no_checkpoint(target))
    assert path is not None
    return path
