"""Where mirrors lie in a node's memory, whose they are, and deleting those that nobody can go on from.

Each start of a run has a token of its own, which stands in `mirror.json` in the run's folder as long as the
run may go on from what that start has mirrored, and in the name of the folder of its mirrors on every node.
So these belong to no other run, and to no earlier start of this one. What jobs left here that are no more,
and whose run has ended, or went on elsewhere, is deleted by the next run of the same user on the node.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from hpctrain.files import delete_folder, files_named, parse_json, read_bytes, read_text

MEMORY = Path("/dev/shm")  # a file system in the memory of every node
MIRROR_FILE = "mirror.json"  # in the run's folder

_NAME = re.compile(r"hpctrain-mirror\.(\d+)\.([0-9a-f]{32})")
_NODE = re.compile(r"node-\d+")
_PART = r"rank-\d+\.[01]"
_OWNER = "owner"
_FILE_BYTES, _PATH_BYTES = 1000, 1 << 16
_SECONDS_TO_BEGIN = 60.0  # what is younger may be a folder that is being made
_SECONDS_UNSEEN = 7 * 86400.0  # so long the folder of a run may be where it is not seen from here


def new_token() -> str:
    """For one start of a run."""
    return uuid.uuid4().hex


def write_token(run: Path, token: str | None) -> None:
    """Say in a run's folder which start's mirrors are the run's; None: none are."""
    path = run / MIRROR_FILE
    if token is None:
        path.unlink(missing_ok=True)
        return
    new = path.with_name(f"{MIRROR_FILE}.new")
    with new.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps({"token": token}) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(path)


def read_token(run: Path) -> str | None:
    """Which start's mirrors are the run's; None where there are none, or the file says nothing."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        token = parse_json(read_bytes(run / MIRROR_FILE, _FILE_BYTES)).get("token")
        if re.fullmatch(r"[0-9a-f]{32}", token):
            return str(token)
    return None


def mirror_folder(token: str) -> Path:
    """Where a start's mirrors lie on this node."""
    return MEMORY / f"hpctrain-mirror.{os.getuid()}.{token}"


def take_mirror_folder(token: str, run: Path, node: int) -> tuple[Path, TextIO]:
    """Make this start's folder on this node, for what is in the memory of `node`, which may be an emulated
    one; it counts as in use until the stream is closed. Called by every rank.
    """
    folder = mirror_folder(token)
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder / _OWNER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    owner = os.fdopen(descriptor, "r+", encoding="utf-8")
    with suppress(OSError):  # without a lock the folder counts as left once its run has gone on elsewhere
        fcntl.flock(owner, fcntl.LOCK_SH)
    owner.write(str(run.resolve()))
    owner.flush()
    own = folder / f"node-{node}"
    own.mkdir(mode=0o700, exist_ok=True)
    return own, owner


def part_path(folder: Path, rank: int, number: int) -> Path:
    """The file of a rank's part in the folder of a node, of which there are two by turns."""
    return folder / f"rank-{rank}.{number}"


def parts_here(token: str) -> list[Path]:
    """All such files of a start in this node's memory, in order."""
    folder = mirror_folder(token)
    if not _is_own(folder):
        return []
    nodes = sorted(path for path in folder.iterdir() if _NODE.fullmatch(path.name) and path.is_dir())
    return sorted(path for node in nodes for path in node.iterdir() if re.fullmatch(_PART, path.name))


def remove_mirrors(token: str) -> None:
    """Delete what a start has mirrored in this node's memory, if anything."""
    _remove(mirror_folder(token))


def sweep_mirrors() -> list[str]:
    """Delete what jobs of this user mirrored that are no more, but for what their runs may go on from; the
    names of the folders.
    """
    removed = []
    with suppress(OSError):
        for folder in sorted(MEMORY.glob(f"hpctrain-mirror.{os.getuid()}.*")):
            match = _NAME.fullmatch(folder.name)
            if match and _is_own(folder) and _is_left(folder, match[2]):
                _remove(folder)
                removed.append(folder.name)
    return removed


def _is_left(folder: Path, token: str) -> bool:
    """Whether no process uses it, and no run may go on from it."""
    try:
        with (folder / _OWNER).open("r+", encoding="utf-8") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        run = Path(read_text(folder / _OWNER, _PATH_BYTES))
    except FileNotFoundError:
        run = Path()
    except (OSError, ValueError):
        return False
    age = time.time() - folder.stat().st_mtime
    if not run.is_absolute():
        return age > _SECONDS_TO_BEGIN
    # Where not even the folder above it is seen from here, the run's file system may not be mounted.
    return read_token(run) != token and (run.parent.is_dir() or age > _SECONDS_UNSEEN)


def _is_own(folder: Path) -> bool:
    with suppress(OSError):
        status = folder.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return False


def _remove(folder: Path) -> None:
    if not _is_own(folder):
        return
    with suppress(OSError):  # of several ranks of a node another one may do the same
        for node in _nodes(folder):
            delete_folder(node, files_named(_PART))
        delete_folder(folder, files_named(_OWNER))


def _nodes(folder: Path) -> Iterator[Path]:
    return (path for path in list(folder.iterdir()) if _NODE.fullmatch(path.name) and _is_own(path))
