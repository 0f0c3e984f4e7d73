"""Rollback of a run to an earlier state, from a copy in memory or from a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from hpctrain.checkpoint.names import checkpoint_step
from hpctrain.checkpoint.retention import list_checkpoints
from hpctrain.checkpoint.state_snapshots import StateSnapshot
from hpctrain.checkpoint.verify_checksums import verify
from hpctrain.errors import HpctrainError
from hpctrain.train.checkpoints import Checkpoints
from hpctrain.train.step import TrainState
from hpctrain.train.trainer import Trainer
from hpctrain.watch.reporter import Reporter

Source = StateSnapshot | Path
"""Copy of a state in memory, or path of a checkpoint."""


class Rollback:
    """Earlier states of a run in memory and on disk, which can be restored. All methods are collective."""

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints, reporter: Reporter) -> None:
        self.trainer, self.checkpoints, self.reporter = trainer, checkpoints, reporter

    def newest(self, latest: int) -> Source | None:
        """Return the newest valid state after at most `latest` steps, if any."""
        return next(self._valid_states(latest, oldest_first=False), None)

    def oldest(self, latest: int) -> Source | None:
        """Return the oldest valid state, if it is after at most `latest` steps."""
        return next(self._valid_states(latest, oldest_first=True), None)

    def restore(self, source: Source) -> TrainState:
        """Restore a state, and return its counters."""
        checkpoints, state = self.checkpoints, self.trainer.state
        for hook in self.trainer.hooks:
            hook.before_rollback()
        restored = (
            checkpoints.restore(source) if isinstance(source, Path) else checkpoints.restore_snapshot(source)
        )
        vars(state).update(vars(restored))
        checkpoints.snapshots.discard_after(restored.step)
        if self.trainer.guard is not None:
            self.trainer.guard.discard_fingerprints()
        self.reporter.record_rollback(restored.step)
        return restored

    def save(self) -> None:
        """Write a checkpoint of the present state and wait for it, so that a killed run resumes from it."""
        self.reporter.working("checkpointing")
        self.checkpoints.save(self.trainer.state)
        self.checkpoints.finish()
        self.reporter.record_checkpoint(self.checkpoints.newest)

    def _valid_states(self, latest: int, oldest_first: bool) -> Iterator[Source]:
        self.checkpoints.finish()
        paths = list_checkpoints(self.checkpoints.folder, self.trainer.world.everyone, current=True)
        sources: list[tuple[int, Source]] = [(checkpoint_step(path) or 0, path) for path in paths]
        sources += [(snapshot.step, snapshot) for snapshot in self.checkpoints.snapshots.all]
        # Copies in memory come last, so that they are preferred to checkpoints of the same step.
        for step, source in sorted(sources, key=lambda each: each[0])[:: 1 if oldest_first else -1]:
            if step <= latest and self._is_valid(source):
                yield source

    def _is_valid(self, source: Source) -> bool:
        """Return True if all ranks find the state valid."""
        everyone = self.trainer.world.everyone
        if isinstance(source, StateSnapshot):
            return not everyone.all_reduce(torch.tensor(0 if source.is_unchanged() else 1)).item()
        try:
            verify(source, everyone)
        except HpctrainError as error:
            logging.getLogger("hpctrain").warning("%s; skipped", error.problems[0])
            return False
        return True
