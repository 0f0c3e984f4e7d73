"""Recovery of a stopped run from copies of its state in the memory of nodes, if they are the newest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint.mirror_folder import read_token, remove_mirrors, write_token
from hpctrain.checkpoint.mirror_search import find_mirror, write_mirror
from hpctrain.checkpoint.names import checkpoint_path, checkpoint_step
from hpctrain.checkpoint.retention import newest_valid, try_point_to
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.report.metric_rows import METRICS_FILE, scan_metrics
from hpctrain.text import counted
from hpctrain.watch.folder import lock_run_folder


@dataclass(frozen=True)
class MirrorRecovery:
    """Result of the recovery: whether the run had mirrors, and sentences about them for the user."""

    mirrored: bool = False
    sentences: tuple[str, ...] = ()


def recover_mirror(world: World, folder: Path) -> MirrorRecovery:
    """Write the newest mirror of a run as a checkpoint, unless a checkpoint is as new. Collective.

    Afterwards all mirrors are deleted.

    Raises:
        HpctrainError: Another job uses the folder; raised on all ranks.
        InputOutputError: The checkpoint cannot be written; raised on all ranks.
    """
    token = world.everyone.broadcast_object(read_token(folder) if world.rank == 0 else None)
    if token is None:
        return MirrorRecovery()
    with world.agreement():
        # The mirrors and temporary files of a job that still runs must not be touched.
        lock = lock_run_folder(folder) if world.rank == 0 else None
    try:
        mirror, sentences = find_mirror(world, token)
        valid_path, _ = newest_valid(folder / "checkpoints", world.everyone)
        on_disk = 0 if valid_path is None else checkpoint_step(valid_path) or 0
        last_step = world.everyone.broadcast_object(_last_step(folder) if world.rank == 0 else 0)
        disk = f"newest on disk: step {on_disk}" if valid_path is not None else "no checkpoint on disk"
        if mirror is not None and mirror.step > on_disk:
            path = checkpoint_path(folder / "checkpoints", mirror.step)
            write_mirror(mirror, path, world)
            try_point_to(path, world.everyone)
            nodes = f"{'node' if len(mirror.hosts) == 1 else 'nodes'} {', '.join(mirror.hosts)}"
            lost = _lost_steps(last_step - mirror.step)
            sentences.append(f"restored step {mirror.step} from the memory of {nodes} ({disk}); {lost}")
        else:
            why = "nothing newer in the memory of the remaining nodes"
            if mirror is not None:
                why = f"newest mirror: step {mirror.step}"
            continuation = f"resumes from step {on_disk}" if valid_path is not None else "starts again"
            sentences.append(f"{disk}, {why}; {continuation}, {_lost_steps(last_step - on_disk)}")
        forget_mirrors(world, folder)
    finally:
        if lock is not None:
            lock.close()
    return MirrorRecovery(True, tuple(sentences))


def forget_mirrors(world: World, folder: Path) -> None:
    """Delete the mirrors of a run in the memory of these nodes, and the token in its folder. Collective."""
    token = world.everyone.broadcast_object(read_token(folder) if world.rank == 0 else None)
    with world.agreement():
        if token is not None and world.local_rank == 0:
            remove_mirrors(token)
        if world.rank == 0:
            write_token(folder, None)


def _lost_steps(steps: int) -> str:
    return (
        f"{counted(steps, 'step')} {'is' if steps == 1 else 'are'} lost" if steps > 0 else "no step is lost"
    )


def _last_step(folder: Path) -> int:
    """Return the last step in the metrics of a run; 0 if there are none."""
    last = 0
    if (folder / METRICS_FILE).exists():
        try:
            for _, row in scan_metrics(folder / METRICS_FILE):
                last = last if row is None else int(row["step"])
        except HpctrainError:
            return last
    return last
