"""What a run is asked while it trains, by signals, files and the clock: agreed by all ranks between steps."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hpctrain.audit.bits import COPIES, majority
from hpctrain.comm.world import World
from hpctrain.errors import InputOutputError
from hpctrain.files import file_identity
from hpctrain.train.signals import Signals
from hpctrain.watch.run_files import CHECKPOINT_FILE, STOP_FILE, is_request

SECONDS_PER_LOOK = 1.0

_FILES, _CLOCK = (CHECKPOINT_FILE, STOP_FILE), "clock"
_SAVING = (signal.SIGUSR1, signal.SIGCONT, CHECKPOINT_FILE)
_STOPPING = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, STOP_FILE, _CLOCK)
_CAUSES = (*_SAVING, *_STOPPING)
_MEASURE = "measure"
_GONE = "gone"
_LOOKS_TO_BE_GONE = 2  # a network file system may hide a folder for a moment


@dataclass(frozen=True)
class StepDecision:
    """What all ranks do now: write a checkpoint, and perhaps stop; `why` is for rank 0 to say.

    `measure`: find out again how fast the machine is; `early`: end here, since nothing is left to learn.
    """

    checkpoint: bool = False
    stop: bool = False
    why: str = ""
    measure: bool = False
    early: bool = False


class Control:
    """Collects what is asked of any rank, and makes it the same on all of them."""

    def __init__(self, world: World, folder: Path, signals: Signals, out_of_time: Callable[[], str]) -> None:
        """`out_of_time`, called on rank 0, says why to stop by the clock; "" for going on."""
        self.world, self.folder, self.signals, self.out_of_time = world, folder, signals, out_of_time
        self._looked = -float("inf")
        self._unremovable: set[str] = set()
        self._identity = file_identity(folder)
        self._looks_without_folder = 0
        self._seen: set[object] = set()

    def agree(self, measure: bool = False) -> StepDecision:
        """Return what was asked of any rank since the last call, and remove its files. Collective.

        `measure`: whether this rank asks for the machine to be measured. InputOutputError on all ranks where
        the run's folder was deleted or replaced.
        """
        world = self.world
        came, late = self._here()
        came |= {_MEASURE} if measure else set()
        causes = (*_CAUSES, _MEASURE, _GONE)
        # The largest is that of the lowest rank which was asked. One bit that arrives wrong at a rank would
        # have it stop alone.
        asked = torch.tensor([world.size - world.rank if cause in came else 0 for cause in causes])
        copies = world.everyone.all_reduce(asked.repeat(COPIES), "max").view(COPIES, -1)
        numbers = majority(copies.t()).tolist()
        ranks = {cause: world.size - number for cause, number in zip(causes, numbers, strict=True) if number}
        if _GONE in ranks:
            with world.agreement():
                sentence = (
                    "was deleted or replaced during training; the run ends, since its files would be lost"
                )
                raise InputOutputError(f"{self.folder}: {sentence}")
        measure = ranks.pop(_MEASURE, None) is not None
        if not ranks:
            return StepDecision(measure=measure)
        stop = any(cause in ranks for cause in _STOPPING)
        if world.rank == 0:
            self._remove([name for name in _FILES if name in ranks])
            self._seen.clear()
        self.signals.came.difference_update(ranks)
        why = (self._words(cause, ranks[cause], late) for cause in ranks if not stop or cause in _STOPPING)
        return StepDecision(True, stop, " and ".join(why), measure and not stop)

    def pending(self) -> bool:
        """Whether anything was asked of this rank, which `agree` will tell the others."""
        return bool(self._here()[0])

    def saved(self) -> None:
        """A checkpoint was written: what asked for one meanwhile, as a signal does that reaches the ranks one
        after the other, has got it."""
        self.signals.came.difference_update(_SAVING)

    def forget(self) -> None:
        """Remove what asks for nothing any more, since the run is done."""
        if self.world.rank == 0:
            self._remove(self._files())

    def _here(self) -> tuple[set[object], str]:
        """What this rank was asked; and, on rank 0, why there is no time left."""
        came: set[object] = set(self.signals.came)
        if self.world.rank != 0:
            return came, ""
        now = time.monotonic()
        if now - self._looked >= SECONDS_PER_LOOK:
            self._looked = now
            self._seen = set(self._files())
            there = file_identity(self.folder) == self._identity
            self._looks_without_folder = 0 if there else self._looks_without_folder + 1
        came |= self._seen
        if self._looks_without_folder >= _LOOKS_TO_BE_GONE:
            came.add(_GONE)
        late = self.out_of_time()
        return came | ({_CLOCK} if late else set()), late

    def _files(self) -> list[str]:
        # A list of the folder is fresh where a network file system would still deny a single new file.
        with contextlib.suppress(OSError):
            with os.scandir(self.folder) as entries:
                there = {entry.name for entry in entries if is_request(entry)}
            return [name for name in _FILES if name in there and name not in self._unremovable]
        return []

    def _remove(self, names: list[str]) -> None:
        for name in names:
            try:
                (self.folder / name).unlink(missing_ok=True)
            except OSError as error:
                self._unremovable.add(name)
                logging.getLogger("hpctrain").warning(
                    "%s: cannot be removed and is ignored from now on: %s", self.folder / name, error
                )

    def _words(self, cause: object, rank: int, late: str) -> str:
        if isinstance(cause, signal.Signals):
            return f"{cause.name} was received by rank {rank}"
        return late if cause == _CLOCK else f"the file {self.folder / str(cause)} exists"
