"""What a live table shows of a run: its status, its newest losses, and the disk; read within bounds."""

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
from hpctrain.report.rows import METRICS_FILE
from hpctrain.watch.statuses import read_status

TAIL_BYTES = 256 << 10  # of the metrics, whose losses are drawn
MOST_FILES = 10_000  # that are counted of a run
SECONDS_PER_COUNT = 30.0


@dataclass(frozen=True)
class DiskUsage:
    """Bytes that a run's files take, and of the file system that they are on: free ones, and its number."""

    used: int
    free: int
    device: int


@dataclass(frozen=True)
class Look:
    """A run at some moment: its status, or why that cannot be read; its newest losses, oldest first."""

    folder: Path
    status: dict[str, Any]
    problem: str
    losses: list[float]
    disk: DiskUsage | None


class Looker:
    """Looks at one run again and again, and reads anew only what has changed."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self._clock = folder, clock
        self._losses: list[float] = []
        self._known: tuple[int, int] | None = None
        self._disk: DiskUsage | None = None
        self._counted = -math.inf

    def status(self) -> Look:
        """What its status says alone."""
        try:
            return Look(self.folder, read_status(self.folder, finds=False), "", [], None)
        except InputOutputError as error:
            return Look(self.folder, {}, error.problems[0], [], None)

    def all_of(self, look: Look) -> Look:
        """The rest, of a run that is shown."""
        return Look(look.folder, look.status, look.problem, self._newest_losses(), self._disk_now())

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
    """The losses in the last rows."""
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
    """Bytes on the disk of the files there and one folder below, links not followed."""
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
