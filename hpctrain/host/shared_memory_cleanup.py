"""Removal of shared memory that a killed job has left on a node.

The ranks of a node communicate through files in /dev/shm ("segments") if MPI is Open MPI. Its launcher
removes them, but not if it is killed as well. The name of a segment does not show whether its job is alive.
So each job writes the names of its segments into a file in the same folder, the marker, and its ranks hold a
lock on that file as long as they live. The next job removes the segments of all markers that nobody has
locked.

It does so before MPI starts. A job that is queued again may get the names of its killed predecessor, and Open
MPI uses an existing file as it is.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from hpctrain.host.mpi_library import MPI

FOLDER = Path("/dev/shm")
MARKER_PREFIX = "hpctrain-segments."
"""Prefix of the names of markers."""

LOCK_PREFIX = "hpctrain-cleanup."
"""Prefix of the name of the file that a process locks while it removes files."""

_MARKER_BYTES = 1 << 20
_SEGMENT = re.compile(r"vader_segment\.[\w.-]+")

_Segments = list[tuple[str, int]]
"""Names and inodes of files."""


class SegmentMarker:
    """File that names the shared memory of this job on this node. Each rank of the node holds a lock on it.

    Args:
        path: Path of the marker.
        stream: Open file that holds the lock.
    """

    def __init__(self, path: Path, stream: TextIO) -> None:
        self.path, self._stream = path, stream

    def remove(self) -> None:
        """Remove the marker file, because MPI or its launcher removes the segments that it names.

        Local; no error is raised.
        """
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def mark_segments(node: MPI.Intracomm, folder: Path = FOLDER) -> SegmentMarker | None:
    """Write a marker of the shared memory that the ranks of this node use, and lock it on each rank.

    Collective over the ranks of the node, after MPI has started; no error is raised for files. The rank that
    writes the marker removes it when its process ends normally.

    Args:
        node: Communicator of the ranks of this node. It may be freed afterwards.
        folder: Folder of the shared memory.

    Returns:
        This rank's handle of the marker, which must be kept as long as the process lives, since the lock ends
        with it. None on all ranks if there is no shared memory to name, as with MPI libraries other than Open
        MPI, or if the marker cannot be written; None on this rank if it cannot be locked here.
    """
    mapped = node.allgather(sorted(_mapped_segments(Path("/proc/self/maps"), folder)))
    names_of_job = sorted({name for names in mapped for name in names})
    marker: SegmentMarker | None = None
    if node.rank == 0:
        marker = _write(_existing_segments(names_of_job, folder), folder)
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
    """Remove the shared memory that dead jobs of this user have left on this node, and their markers.

    Local. Every rank calls it before it starts MPI; no error is raised. Only one rank of the node removes
    files at a time. So when it returns, none are left that another rank could still remove, and this rank may
    use their names. Jobs that are alive lose nothing: their markers are locked. A file stays if it is not the
    one that the marker names, belongs to another user, or is in use by a process.

    Args:
        folder: Folder of the shared memory.
        proc: Folder in which the kernel describes processes.

    Returns:
        The names of the removed segments, without folder and markers; [] if there were none.
    """
    removed: list[str] = []
    with contextlib.suppress(OSError), _only_cleaner(folder):
        for path in folder.glob(f"{MARKER_PREFIX}*"):
            with contextlib.suppress(OSError, ValueError, TypeError), _lock_stale_marker(path) as stream:
                entries = json.loads(stream.read(_MARKER_BYTES))
                left: _Segments = [(str(name), int(inode)) for name, inode in entries]
                used = set().union(*(_mapped_segments(maps, folder) for maps in proc.glob("[0-9]*/maps")))
                existing = _existing_segments([name for name, _ in left if _SEGMENT.fullmatch(name)], folder)
                for name, _ in (each for each in existing if each in left and each[0] not in used):
                    (folder / name).unlink()
                    removed.append(name)
                path.unlink()
    return removed


def _write(segments: _Segments, folder: Path) -> SegmentMarker | None:
    """Write and lock a marker. Return None if there is nothing to name, or it cannot be written."""
    path = folder / f"{MARKER_PREFIX}{os.getuid()}.{uuid.uuid4().hex}"
    new = path.with_name(f".{path.name}")
    with contextlib.suppress(OSError):
        if segments:
            stream = new.open("x", encoding="utf-8")
            fcntl.flock(stream, fcntl.LOCK_SH)
            stream.write(json.dumps(segments))
            stream.flush()
            new.replace(path)
            return SegmentMarker(path, stream)
    return None


@contextlib.contextmanager
def _only_cleaner(folder: Path) -> Iterator[None]:
    """Return a context manager in whose block no other process of this user removes files of dead jobs.

    Raises:
        OSError: The file that is locked belongs to another user, or cannot be created.
    """
    path = folder / f"{LOCK_PREFIX}{os.getuid()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    with os.fdopen(descriptor, "rb"):
        if os.fstat(descriptor).st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to another user")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _lock_stale_marker(path: Path) -> Any:
    """Open and lock the marker of a dead job of this user.

    Raises:
        OSError: The marker belongs to another user, or its job is alive.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, encoding="utf-8") as stream:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} is not a marker of this user")
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield stream


def _existing_segments(names: list[str], folder: Path) -> _Segments:
    """Return those files that exist and belong to this user, with their inodes."""
    ours: _Segments = []
    for name in names:
        with contextlib.suppress(OSError):
            status = (folder / name).lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                ours.append((name, status.st_ino))
    return ours


def _mapped_segments(maps: Path, folder: Path) -> set[str]:
    """Return the names of the segments that a process has mapped; empty if it has ended or hides this."""
    names: set[str] = set()
    with contextlib.suppress(OSError):
        for line in maps.read_text(encoding="utf-8", errors="replace").splitlines():
            where, _, name = line.rpartition("/")
            if where.endswith(f" {folder}") and _SEGMENT.fullmatch(name):
                names.add(name)
    return names
