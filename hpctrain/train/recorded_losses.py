"""The losses that a run recorded after a checkpoint: in its metrics file, or in its later checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import h5py

from hpctrain.checkpoint.names import checkpoint_step, checkpoints
from hpctrain.checkpoint.provenance import HistorySegment, Loss, history, losses
from hpctrain.checkpoint.structure import examine
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.report.rows import METRICS_FILE, read_metrics


@dataclass(frozen=True)
class Recorded:
    """Losses of the steps right after `step`, without a gap; where they were found; which runs made them.

    `segments` are empty where no checkpoint tells them.
    """

    step: int
    losses: list[Loss]
    source: str
    segments: list[HistorySegment] = field(default_factory=list)


def find_recorded(world: World, path: Path, step: int, against: Path | None) -> Recorded:
    """What was recorded after the checkpoint at `path`; collective, rank 0 looks, all learn it.

    In `against` where it is given; else in the metrics file of the run's folder or, where that has none, in
    the later checkpoints beside it. Errors, on all ranks: those of reading `against` or the metrics file.
    """
    with world.agreement():
        recorded = _look(path, step, against) if world.rank == 0 else None
    shared: Recorded = world.everyone.broadcast_object(recorded)
    return shared


def _look(path: Path, step: int, against: Path | None) -> Recorded:
    if against is not None and not (against.is_file() and h5py.is_hdf5(against)):
        return Recorded(step, _following(_metrics(against), step), str(against))
    if against is not None:
        return _in_checkpoints([against], step, str(against))
    later = [other for other in checkpoints(path.parent) if (checkpoint_step(other) or 0) > step]
    beside = _in_checkpoints(later, step, f"the later checkpoints of {path.parent}", strict=False)
    metrics = path.absolute().parent.parent / METRICS_FILE
    if path.absolute().parent.name == "checkpoints" and metrics.is_file():
        following = _following(_metrics(metrics), step)
        if following or not beside.losses:
            return Recorded(step, following, str(path.parent.parent / METRICS_FILE), beside.segments)
    return beside


def _in_checkpoints(paths: list[Path], step: int, source: str, strict: bool = True) -> Recorded:
    """Losses and runs that these checkpoints tell, the first one first; damaged ones only if not `strict`."""
    known: dict[int, Loss] = {}
    segments: list[HistorySegment] = []
    for path in paths:
        try:
            state = examine(path).state
        except HpctrainError:
            if strict:
                raise
            continue
        known = {each.step: each for each in losses(state)} | known
        segments = segments or [each for each in history(state) if each.last_step > step]
    return Recorded(step, _following(list(known.values()), step), source, segments)


def _metrics(path: Path) -> list[Loss]:
    """The steps of a metrics file; evaluations that belong to no step have no "loss"."""
    return losses({"losses": [row for row in read_metrics(path) if "loss" in row]})


def _following(recorded: list[Loss], step: int) -> list[Loss]:
    """The losses of the steps right after `step`, up to the first that is not there."""
    by_step = {each.step: each for each in recorded}
    following: list[Loss] = []
    while (each := by_step.get(step + 1 + len(following))) is not None:
        following.append(each)
    return following
