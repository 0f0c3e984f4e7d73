"""Going on from what nodes hold in memory of a run that was stopped, where that is newer than the disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint.mirror_folder import read_token, remove_mirrors, write_token
from hpctrain.checkpoint.mirror_search import find_mirror, write_mirror
from hpctrain.checkpoint.names import checkpoint_path, checkpoint_step
from hpctrain.checkpoint.retention import newest_good, try_point_to
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.report.metric_rows import METRICS_FILE, scan_metrics
from hpctrain.text import counted
from hpctrain.watch.folder import take_folder


@dataclass(frozen=True)
class MirrorRecovery:
    """Whether a run had mirrors, and what came of them, in words."""

    mirrored: bool = False
    sentences: tuple[str, ...] = ()


def take_mirror(world: World, folder: Path) -> MirrorRecovery:
    """Write as a checkpoint what nodes hold in memory of the run in this folder, where that is newer than the
    newest good one on the disk; what was mirrored is deleted then. Collective.

    HpctrainError on all ranks where another job writes to the folder, InputOutputError where the disk
    refuses.
    """
    token = world.everyone.broadcast_object(read_token(folder) if world.rank == 0 else None)
    if token is None:
        return MirrorRecovery()
    with world.agreement():
        # Of a job that lives the mirrors are not ours to take, nor are its temporary files.
        lock = take_folder(folder) if world.rank == 0 else None
    try:
        found, sentences = find_mirror(world, token)
        good, _ = newest_good(folder / "checkpoints", world.everyone)
        on_disk = 0 if good is None else checkpoint_step(good) or 0
        came = world.everyone.broadcast_object(_last_step(folder) if world.rank == 0 else 0)
        disk = f"newest on disk: step {on_disk}" if good is not None else "no checkpoint on disk"
        if found is not None and found.step > on_disk:
            path = checkpoint_path(folder / "checkpoints", found.step)
            write_mirror(found, path, world)
            try_point_to(path, world.everyone)
            nodes = f"{'node' if len(found.hosts) == 1 else 'nodes'} {', '.join(found.hosts)}"
            lost = _lost(came - found.step)
            sentences.append(f"restored step {found.step} from the memory of {nodes} ({disk}); {lost}")
        else:
            why = "nothing newer in the memory of the remaining nodes"
            if found is not None:
                why = f"newest mirror: step {found.step}"
            go_on = f"resumes from step {on_disk}" if good is not None else "starts again"
            sentences.append(f"{disk}, {why}; {go_on}, {_lost(came - on_disk)}")
        forget_mirrors(world, folder)
    finally:
        if lock is not None:
            lock.close()
    return MirrorRecovery(True, tuple(sentences))


def forget_mirrors(world: World, folder: Path) -> None:
    """Delete what is in memory here of the run in this folder, and say there that it has none. Collective."""
    token = world.everyone.broadcast_object(read_token(folder) if world.rank == 0 else None)
    with world.agreement():
        if token is not None and world.local_rank == 0:
            remove_mirrors(token)
        if world.rank == 0:
            write_token(folder, None)


def _lost(steps: int) -> str:
    return (
        f"{counted(steps, 'step')} {'is' if steps == 1 else 'are'} lost" if steps > 0 else "no step is lost"
    )


def _last_step(folder: Path) -> int:
    """How far a run had come, as it wrote down."""
    last = 0
    if (folder / METRICS_FILE).exists():
        try:
            for _, row in scan_metrics(folder / METRICS_FILE):
                last = last if row is None else int(row["step"])
        except HpctrainError:
            return last
    return last
