"""Losses that a run recorded after a checkpoint, in its metrics file or in later checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.checkpoint_index import examine
from hpctrain.checkpoint.load import read_state
from hpctrain.checkpoint.names import checkpoint_path, checkpoint_step, current_checkpoints
from hpctrain.checkpoint.provenance import HistorySegment, RecordedLoss, history, losses
from hpctrain.checkpoint.retention import list_checkpoints
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.hdf5 import format_of
from hpctrain.report.metric_rows import METRICS_FILE, read_metrics
from hpctrain.text import counted
from hpctrain.train.compared_run import known_spikes, rollback_sentence
from hpctrain.train.rollback_history import find_rollback


@dataclass(frozen=True)
class RecordedLosses:
    """Recorded losses of the steps after a checkpoint.

    Attributes:
        step: Step of the checkpoint.
        losses: Losses of the following steps, without a gap.
        source: Description of where they are recorded.
        segments: Runs that made these steps; empty if no checkpoint stores them.
    """

    step: int
    losses: list[RecordedLoss]
    source: str
    segments: list[HistorySegment] = field(default_factory=list)


def find_recorded_losses(
    world: World, path: Path, state: Mapping[str, Any], against: Path | None
) -> RecordedLosses:
    """Return the losses that were recorded after a checkpoint. Collective; rank 0 reads the files.

    Args:
        world: The world.
        path: The checkpoint.
        state: Its state.
        against: Metrics file or later checkpoint to read; None for the metrics file of the run folder, or
            else the later checkpoints in the folder.

    Raises:
        HpctrainError: The files cannot be read, or a rollback has made the checkpoint invalid; raised on all
            ranks.
    """
    with world.agreement():
        recorded = _read_losses(path, state, against) if world.rank == 0 else None
    shared: RecordedLosses = world.everyone.broadcast_object(recorded)
    return shared


def newest_checkpoint_with_losses(
    world: World, folder: Path, steps: int | None, against: Path | None
) -> Path:
    """Return the newest checkpoint of a run after which losses are recorded. Collective.

    Args:
        world: The world.
        folder: Run folder, or folder of checkpoints.
        steps: Number of losses that must be recorded after it; None for at least one.
        against: As in `find_recorded_losses`.

    Raises:
        HpctrainError: There is none, or no checkpoint at all.
    """
    within = folder / "checkpoints"
    if world.everyone.broadcast_object(within.is_dir()):
        folder = within
    paths = list_checkpoints(folder, world.everyone, current=True)
    if not paths:
        raise InputOutputError(f"{folder}: has no checkpoint (files such as step-00000100.h5)")
    reason = ""
    for path in paths:
        try:
            recorded = find_recorded_losses(world, path, read_state(path, world.everyone), against)
        except HpctrainError as error:
            reason = error.problems[0]
        else:
            if len(recorded.losses) >= (steps or 1):
                return path
            reason = f"{len(recorded.losses)} are recorded in {recorded.source} after step {recorded.step}"
    needed = counted(steps or 1, "loss")
    raise HpctrainError(f"{folder}: no checkpoint has {needed} recorded after it ({reason})")


def _read_losses(path: Path, state: Mapping[str, Any], against: Path | None) -> RecordedLosses:
    step, folder = int(state["step"]), path.parent
    states: list[Mapping[str, Any]] = []
    metrics: Path | None = folder.parent / METRICS_FILE
    if against is not None:
        metrics = None if format_of(against) is not None else against
        states, source = [examine(against).state] if metrics is None else states, str(against)
    else:
        states, source = list(_readable_later_states(folder, step)), f"the later checkpoints of {folder}"
        if path.absolute().parent.name != "checkpoints" or not (folder.parent / METRICS_FILE).is_file():
            metrics = None
    rows = [] if metrics is None else [row for row in read_metrics(metrics) if "loss" in row]
    spikes = known_spikes(states[0] if states else {}, rows)
    if (back := find_rollback(state, spikes)) is not None:
        there = (
            f"; {checkpoint_path(folder, back)} is the one from which the run continued"
            if against is None
            else ""
        )
        raise HpctrainError(f"{rollback_sentence(path, back)}, so no recorded step continues from it{there}")
    from_checkpoints = _losses_in_states(
        (each for each in states if find_rollback(each, spikes) is None), step, source
    )
    following = _consecutive_losses(losses({"losses": rows}), step)
    if metrics is None or (from_checkpoints.losses and not following):
        return from_checkpoints
    return RecordedLosses(step, following, str(metrics), from_checkpoints.segments)


def _readable_later_states(folder: Path, step: int) -> Iterator[Mapping[str, Any]]:
    """Yield the states of the readable later checkpoints in a folder, from the newest on."""
    for path in current_checkpoints(folder):
        if (checkpoint_step(path) or 0) > step:
            with suppress(HpctrainError):
                yield examine(path).state


def _losses_in_states(states: Iterable[Mapping[str, Any]], step: int, source: str) -> RecordedLosses:
    """Return the losses and runs that the states of checkpoints store."""
    known: dict[int, RecordedLoss] = {}
    segments: list[HistorySegment] = []
    for state in states:
        known = {each.step: each for each in losses(state)} | known
        segments = segments or [each for each in history(state) if each.last_step > step]
    return RecordedLosses(step, _consecutive_losses(list(known.values()), step), source, segments)


def _consecutive_losses(recorded: list[RecordedLoss], step: int) -> list[RecordedLoss]:
    """Return the losses of the steps after `step`, up to the first missing one."""
    by_step = {each.step: each for each in recorded}
    following: list[RecordedLoss] = []
    while (each := by_step.get(step + 1 + len(following))) is not None:
        following.append(each)
    return following
