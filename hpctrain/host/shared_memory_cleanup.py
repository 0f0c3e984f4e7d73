"""Shared memory that outlives a killed job: noted while the job lives, removed when the next one starts.

Open MPI's ranks of a node talk through files in /dev/shm. Its launcher removes them, unless that is killed
too. Who made such a file cannot be seen from it, so each job notes its own in a marker beside them, on which
its ranks hold a lock as long as they live. What a marker names whose lock is free was left by a dead job.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import re
import stat
import uuid
from pathlib import Path
from typing import Any, TextIO

from hpctrain.host.mpi_library import MPI

FOLDER = Path("/dev/shm")
MARKER = "hpctrain-segments."
_MARKER_BYTES = 1 << 20
_SEGMENT = re.compile(r"vader_segment\.[\w.-]+")

Named = list[tuple[str, int]]


class SegmentMarker:
    """What this job has in shared memory of this node; held by each of the node's ranks."""

    def __init__(self, path: Path, stream: TextIO) -> None:
        self.path, self._stream = path, stream

    def remove(self) -> None:
        """Take it away: MPI, or its launcher, has removed or will remove what it names."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def mark_segments(node: MPI.Intracomm, folder: Path = FOLDER) -> SegmentMarker | None:
    """Note what the ranks of this node have mapped; None where there is nothing. Collective over them.

    The rank that made it removes it when its process ends in good order.
    """
    mapped = node.allgather(sorted(_mapped(Path("/proc/self/maps"), folder)))
    own = sorted({name for names in mapped for name in names})
    marker: SegmentMarker | None = None
    if node.rank == 0:
        marker = _write(_identified(own, folder), folder)
    path = node.bcast(None if marker is None else marker.path)
    if path is None:
        return None
    if marker is not None:
        atexit.register(marker.remove)
        return marker
    with contextlib.suppress(OSError):
        stream = path.open(encoding="utf-8")
        fcntl.flock(stream, fcntl.LOCK_SH)
        return SegmentMarker(path, stream)
    return None


def remove_stale_segments(folder: Path = FOLDER, proc: Path = Path("/proc")) -> list[str]:
    """Remove what dead jobs of this user left on this node, and their markers; the names of what was removed.

    A file stays if it is not the one that was noted, is somebody else's, or is mapped by any process.
    """
    removed: list[str] = []
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{MARKER}*"):
            with contextlib.suppress(OSError, ValueError, TypeError), _taken(path) as stream:
                noted = json.loads(stream.read(_MARKER_BYTES))
                left: Named = [(str(name), int(inode)) for name, inode in noted]
                used = set().union(*(_mapped(maps, folder) for maps in proc.glob("[0-9]*/maps")))
                there = _identified([name for name, _ in left if _SEGMENT.fullmatch(name)], folder)
                for name, _ in (each for each in there if each in left and each[0] not in used):
                    (folder / name).unlink()
                    removed.append(name)
                path.unlink()
    return removed


def _write(own: Named, folder: Path) -> SegmentMarker | None:
    """The marker, locked before it has its name; None where nothing is to be noted, or it cannot be."""
    path = folder / f"{MARKER}{os.getuid()}.{uuid.uuid4().hex}"
    new = path.with_name(f".{path.name}")
    with contextlib.suppress(OSError):
        if own:
            stream = new.open("x", encoding="utf-8")
            fcntl.flock(stream, fcntl.LOCK_SH)
            stream.write(json.dumps(own))
            stream.flush()
            new.replace(path)
            return SegmentMarker(path, stream)
    return None


@contextlib.contextmanager
def _taken(path: Path) -> Any:
    """A marker of ours, open and locked; OSError where it is another user's, or of a job that lives."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, encoding="utf-8") as stream:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} is no marker of this user")
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield stream


def _identified(names: list[str], folder: Path) -> Named:
    """Those of the files that are there and this user's, with their inodes."""
    ours: Named = []
    for name in names:
        with contextlib.suppress(OSError):
            status = (folder / name).lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                ours.append((name, status.st_ino))
    return ours


def _mapped(maps: Path, folder: Path) -> set[str]:
    """Names of the segments that a process has mapped; none of a process that has ended or hides it."""
    names: set[str] = set()
    with contextlib.suppress(OSError):
        for line in maps.read_text(encoding="utf-8", errors="replace").splitlines():
            where, _, name = line.rpartition("/")
            if where.endswith(f" {folder}") and _SEGMENT.fullmatch(name):
                names.add(name)
    return names
