"""Values of a run that a live table shows: status, newest losses, and disk space, with limits on reading."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import InputOutputError
from hpctrain.files import open_regular, parse_json
from hpctrain.report.metric_rows import METRICS_FILE
from hpctrain.watch.statuses import read_status

TAIL_BYTES = 256 << 10
"""Bytes at the end of metrics.jsonl whose losses are drawn."""

MOST_FILES = 10_000
"""Largest number of files whose sizes are counted."""

SECONDS_PER_COUNT = 30.0
"""Seconds after which the disk space is counted again."""


@dataclass(frozen=True)
class DiskUsage:
    """Disk space of a run.

    Attributes:
        used: Bytes that the run's files occupy.
        free: Free bytes of their file system.
        device: Number of the file system.
    """

    used: int
    free: int
    device: int


@dataclass(frozen=True)
class RunView:
    """Values of a run at some time.

    Attributes:
        folder: The run folder.
        status: Status of the run; empty if it cannot be read.
        problem: Reason why it cannot be read, else "".
        losses: Newest losses, oldest first.
        disk: Disk space; None if it is unknown.
    """

    folder: Path
    status: dict[str, Any]
    problem: str
    losses: list[float]
    disk: DiskUsage | None


class RunViewer:
    """Reads the values of one run repeatedly, and only files that have changed since."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self._clock = folder, clock
        self._losses: list[float] = []
        self._known: tuple[int, int] | None = None
        self._disk: DiskUsage | None = None
        self._counted = -math.inf

    def status(self) -> RunView:
        """Return the status of the run, without losses and disk space."""
        try:
            return RunView(self.folder, read_status(self.folder, finds_checkpoint=False), "", [], None)
        except InputOutputError as error:
            return RunView(self.folder, {}, error.problems[0], [], None)

    def with_details(self, view: RunView) -> RunView:
        """Return a view with losses and disk space added."""
        return RunView(view.folder, view.status, view.problem, self._newest_losses(), self._disk_now())

    def _newest_losses(self) -> list[float]:
        path = self.folder / METRICS_FILE
        try:
            status = path.stat()
            known = status.st_size, status.st_mtime_ns
            if known != self._known:
                self._losses, self._known = _tail(path, status.st_size), known
        except OSError:
            self._losses, self._known = [], None
        return self._losses

    def _disk_now(self) -> DiskUsage | None:
        now = self._clock()
        if now - self._counted >= SECONDS_PER_COUNT:
            self._counted = now
            try:
                system = os.statvfs(self.folder)
                device = self.folder.stat().st_dev
            except OSError:
                self._disk = None
            else:
                self._disk = DiskUsage(_used(self.folder), system.f_bavail * system.f_frsize, device)
        return self._disk


def _tail(path: Path, size: int) -> list[float]:
    """Return the losses in the last rows of a metrics file."""
    with open_regular(path) as stream:
        stream.seek(max(0, size - TAIL_BYTES))
        lines = stream.read(TAIL_BYTES).split(b"\n")
    losses = []
    for line in lines[size > TAIL_BYTES : -1]:
        try:
            loss = parse_json(line)["loss"]
        except (ValueError, TypeError, KeyError):
            continue
        if isinstance(loss, int | float) and math.isfinite(loss):
            losses.append(float(loss))
    return losses


def _used(folder: Path) -> int:
    """Return the bytes on the disk of the files in a folder and one level below. Links are not followed."""
    used, left, waiting = 0, MOST_FILES, [(folder, True)]
    while waiting:
        path, deeper = waiting.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    left -= 1
                    if left < 0:
                        return used
                    if entry.is_dir(follow_symlinks=False):
                        waiting += [(Path(entry.path), False)] if deeper else []
                    else:
                        used += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:
            continue
    return used
