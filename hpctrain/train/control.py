"""Requests to a running run, by signals, files and the time limit, on which all ranks agree between steps."""

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

SECONDS_PER_CHECK = 1.0
"""Seconds between two checks of the run folder."""

_FILES, _CLOCK = (CHECKPOINT_FILE, STOP_FILE), "clock"
_SAVING = (signal.SIGUSR1, signal.SIGCONT, CHECKPOINT_FILE)
_STOPPING = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, STOP_FILE, _CLOCK)
_CAUSES = (*_SAVING, *_STOPPING)
_MEASURE = "measure"
_GONE = "gone"
_CHECKS_UNTIL_GONE = 2
"""Checks in a row without the folder after which it is gone; a network file system may hide it briefly."""


@dataclass(frozen=True)
class StepDecision:
    """Decision of all ranks between two steps.

    Attributes:
        checkpoint: True to write a checkpoint.
        stop: True to stop; the run can resume.
        reason: Reason, for messages of rank 0.
        measure: True to measure the speed of the machine again.
        ends_early: True to end the run, since the loss does not fall any more (`run.patience`).
    """

    checkpoint: bool = False
    stop: bool = False
    reason: str = ""
    measure: bool = False
    ends_early: bool = False


class Control:
    """Collects the requests to each rank, and turns them into a decision of all ranks."""

    def __init__(self, world: World, folder: Path, signals: Signals, out_of_time: Callable[[], str]) -> None:
        """Record the identity of the run folder, by which its replacement is noticed later.

        Args:
            world: The world.
            folder: Run folder, in which request files appear.
            signals: Signals that this process has received.
            out_of_time: Called on rank 0; returns why the time does not suffice for another step, or "".
        """
        self.world, self.folder, self.signals, self.out_of_time = world, folder, signals, out_of_time
        self._last_check = -float("inf")
        self._unremovable: set[str] = set()
        self._identity = file_identity(folder)
        self._checks_without_folder = 0
        self._request_files: set[object] = set()

    def agree(self, measure: bool = False) -> StepDecision:
        """Decide on the requests to any rank since the last call, and remove request files. Collective.

        Args:
            measure: True if this rank requests a measurement of the machine.

        Raises:
            InputOutputError: The run folder was deleted or replaced; raised on all ranks.
        """
        world = self.world
        requests_here, time_reason = self._local_requests()
        requests_here |= {_MEASURE} if measure else set()
        causes = (*_CAUSES, _MEASURE, _GONE)
        # The maximum belongs to the lowest rank with the request. It is sent several times, since a wrong bit
        # could make one rank stop alone.
        requests = torch.tensor(
            [world.size - world.rank if cause in requests_here else 0 for cause in causes]
        )
        copies = world.everyone.all_reduce(requests.repeat(COPIES), "max").view(COPIES, -1)
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
            self._request_files.clear()
        self.signals.received.difference_update(ranks)
        reasons = (
            self._describe_cause(cause, ranks[cause], time_reason)
            for cause in ranks
            if not stop or cause in _STOPPING
        )
        return StepDecision(True, stop, " and ".join(reasons), measure and not stop)

    def is_pending(self) -> bool:
        """Return True if this rank has a request that `agree` will handle. Local."""
        return bool(self._local_requests()[0])

    def discard_save_requests(self) -> None:
        """Discard requests for a checkpoint that have arrived while one was written.

        A signal may reach the ranks one after the other.
        """
        self.signals.received.difference_update(_SAVING)

    def remove_requests(self) -> None:
        """Remove request files, since the run is done."""
        if self.world.rank == 0:
            self._remove(self._files())

    def _local_requests(self) -> tuple[set[object], str]:
        """Return the requests to this rank, and on rank 0 the reason why no time is left, or ""."""
        requests_here: set[object] = set(self.signals.received)
        if self.world.rank != 0:
            return requests_here, ""
        now = time.monotonic()
        if now - self._last_check >= SECONDS_PER_CHECK:
            self._last_check = now
            self._request_files = set(self._files())
            exists = file_identity(self.folder) == self._identity
            self._checks_without_folder = 0 if exists else self._checks_without_folder + 1
        requests_here |= self._request_files
        if self._checks_without_folder >= _CHECKS_UNTIL_GONE:
            requests_here.add(_GONE)
        time_reason = self.out_of_time()
        return requests_here | ({_CLOCK} if time_reason else set()), time_reason

    def _files(self) -> list[str]:
        # On a network file system, listing the folder finds new files earlier than asking for one file.
        with contextlib.suppress(OSError):
            with os.scandir(self.folder) as entries:
                names = {entry.name for entry in entries if is_request(entry)}
            return [name for name in _FILES if name in names and name not in self._unremovable]
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

    def _describe_cause(self, cause: object, rank: int, time_reason: str) -> str:
        if isinstance(cause, signal.Signals):
            return f"{cause.name} was received by rank {rank}"
        return time_reason if cause == _CLOCK else f"the file {self.folder / str(cause)} exists"
