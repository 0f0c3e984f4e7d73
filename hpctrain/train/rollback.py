"""The way back of a run to an earlier state of its own: where it could go, and going there."""

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
"""A copy in memory, or a checkpoint."""


class Rollback:
    """Earlier states of a run, in memory and on the disk. All methods are collective."""

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints, reporter: Reporter) -> None:
        self.trainer, self.checkpoints, self.reporter = trainer, checkpoints, reporter

    def newest(self, latest: int) -> Source | None:
        """The newest good one after `latest` steps or fewer."""
        return next(self._good(latest, oldest_first=False), None)

    def oldest(self, latest: int) -> Source | None:
        """The oldest good one, if it is not after more than `latest` steps."""
        return next(self._good(latest, oldest_first=True), None)

    def take(self, source: Source) -> TrainState:
        """Have the run's state be that one; what it was begun with."""
        checkpoints, state = self.checkpoints, self.trainer.state
        for hook in self.trainer.hooks:
            hook.before_rollback()
        restored = (
            checkpoints.restore(source) if isinstance(source, Path) else checkpoints.restore_snapshot(source)
        )
        vars(state).update(vars(restored))
        checkpoints.snapshots.discard_after(restored.step)
        if self.trainer.guard is not None:
            self.trainer.guard.forget()
        self.reporter.record_rollback(restored.step)
        return restored

    def save(self) -> None:
        """Write a checkpoint of the present state at once: who resumes the run from here on finds it."""
        self.reporter.working("checkpointing")
        self.checkpoints.save(self.trainer.state)
        self.checkpoints.finish()
        self.reporter.record_checkpoint(self.checkpoints.newest)

    def _good(self, latest: int, oldest_first: bool) -> Iterator[Source]:
        self.checkpoints.finish()
        paths = list_checkpoints(self.checkpoints.folder, self.trainer.world.everyone, present=True)
        sources: list[tuple[int, Source]] = [(checkpoint_step(path) or 0, path) for path in paths]
        sources += [(held.step, held) for held in self.checkpoints.snapshots.all]
        # Of the same step what is in memory is quicker, and stands behind.
        for step, source in sorted(sources, key=lambda each: each[0])[:: 1 if oldest_first else -1]:
            if step <= latest and self._is_good(source):
                yield source

    def _is_good(self, source: Source) -> bool:
        """Whether all ranks find it so."""
        everyone = self.trainer.world.everyone
        if isinstance(source, StateSnapshot):
            return not everyone.all_reduce(torch.tensor(0 if source.is_unchanged() else 1)).item()
        try:
            verify(source, everyone)
        except HpctrainError as error:
            logging.getLogger("hpctrain").warning("%s; skipped", error.problems[0])
            return False
        return True
