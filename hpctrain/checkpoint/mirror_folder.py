"""Folders of mirrors in the memory of nodes, and deletion of those that no run can resume from.

Each start of a run has a token. It is in the name of the folder of its mirrors on each node, and in
`mirror.json` in the run's folder as long as the run may resume from these mirrors. So mirrors of other runs
and of earlier starts are never used. Jobs that have ended may leave folders. If their run has ended or was
resumed elsewhere, the next run of the same user on the node deletes them.
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

MEMORY = Path("/dev/shm")
"""File system in the memory of each node."""

MIRROR_FILE = "mirror.json"
"""Name of the file with the token, in the run's folder."""

_NAME = re.compile(r"hpctrain-mirror\.(\d+)\.([0-9a-f]{32})")
_NODE = re.compile(r"node-\d+")
_PART = r"rank-\d+\.[01]"
_OWNER = "owner"
_FILE_BYTES, _PATH_BYTES = 1000, 1 << 16
_SECONDS_TO_BEGIN = 60.0
"""Age up to which a folder without an owner may be one that is being created."""

_SECONDS_UNSEEN = 7 * 86400.0
"""Age up to which a folder is not deleted if the file system of its run is not mounted here."""


def new_token() -> str:
    """Return a new token for a start of a run."""
    return uuid.uuid4().hex


def write_token(run: Path, token: str | None) -> None:
    """Write the token of the mirrors that a run may resume from to its folder; None deletes the file."""
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
    """Return the token of the mirrors that a run may resume from; None if there are none."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        token = parse_json(read_bytes(run / MIRROR_FILE, _FILE_BYTES)).get("token")
        if re.fullmatch(r"[0-9a-f]{32}", token):
            return str(token)
    return None


def mirror_folder(token: str) -> Path:
    """Return the folder of a start's mirrors on this node."""
    return MEMORY / f"hpctrain-mirror.{os.getuid()}.{token}"


def create_mirror_folder(token: str, run: Path, node: int) -> tuple[Path, TextIO]:
    """Create this start's folder for a node. Each rank calls this.

    Args:
        token: Token of the start.
        run: Folder of the run.
        node: Number of the node, of which several may be emulated on one machine.

    Returns:
        The folder, and a stream with a lock: the folder is in use until it is closed.
    """
    folder = mirror_folder(token)
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder / _OWNER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    owner = os.fdopen(descriptor, "r+", encoding="utf-8")
    with suppress(OSError):  # without a lock, the folder is abandoned when its run was resumed elsewhere
        fcntl.flock(owner, fcntl.LOCK_SH)
    owner.write(str(run.resolve()))
    owner.flush()
    node_folder = folder / f"node-{node}"
    node_folder.mkdir(mode=0o700, exist_ok=True)
    return node_folder, owner


def part_path(folder: Path, rank: int, number: int) -> Path:
    """Return the path of a rank's part. Mirrors use the numbers 0 and 1 in turn."""
    return folder / f"rank-{rank}.{number}"


def local_parts(token: str) -> list[Path]:
    """Return the files of all parts of a start on this node, sorted."""
    folder = mirror_folder(token)
    if not _belongs_to_user(folder):
        return []
    nodes = sorted(path for path in folder.iterdir() if _NODE.fullmatch(path.name) and path.is_dir())
    return sorted(path for node in nodes for path in node.iterdir() if re.fullmatch(_PART, path.name))


def remove_mirrors(token: str) -> None:
    """Delete the mirrors of a start on this node, if there are any."""
    _remove(mirror_folder(token))


def sweep_mirrors() -> list[str]:
    """Delete the abandoned mirrors of this user on this node, and return the names of their folders."""
    removed = []
    with suppress(OSError):
        for folder in sorted(MEMORY.glob(f"hpctrain-mirror.{os.getuid()}.*")):
            match = _NAME.fullmatch(folder.name)
            if match and _belongs_to_user(folder) and _is_abandoned(folder, match[2]):
                _remove(folder)
                removed.append(folder.name)
    return removed


def _is_abandoned(folder: Path, token: str) -> bool:
    """Return True if no process uses a folder of mirrors, and no run may resume from it."""
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
    # If the parent of the run's folder is missing, its file system may not be mounted here.
    return read_token(run) != token and (run.parent.is_dir() or age > _SECONDS_UNSEEN)


def _belongs_to_user(folder: Path) -> bool:
    """Return True for a folder, not a link, of this user."""
    with suppress(OSError):
        status = folder.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return False


def _remove(folder: Path) -> None:
    if not _belongs_to_user(folder):
        return
    with suppress(OSError):  # another rank of the node may delete it, too
        for node in _nodes(folder):
            delete_folder(node, files_named(_PART))
        delete_folder(folder, files_named(_OWNER))


def _nodes(folder: Path) -> Iterator[Path]:
    return (path for path in list(folder.iterdir()) if _NODE.fullmatch(path.name) and _belongs_to_user(path))
