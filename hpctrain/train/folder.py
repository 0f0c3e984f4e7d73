"""The folder of a run: whose it is, and that one job alone writes to it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import socket
import time
from pathlib import Path
from typing import TextIO

from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError

LOCK = "lock"
"""Name of the file that is locked while a job writes to the folder; it tells which one."""

_SECONDS_PER_LOOK = 0.1

# What file systems without locks say.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def refuse_other_run(deck: Deck) -> None:
    """Raise if the run's folder holds another run."""
    folder = Path(deck.run.dir)
    if any((folder / name).exists() for name in ("deck.toml", "metrics.jsonl", "checkpoints")):
        raise HpctrainError(
            deck.problem(
                "run.dir",
                f"holds another run already; go on with it by `hpctrain resume {folder}`, replace it with "
                "`--fresh`, or choose another run.dir or run.title",
            )
        )


def remove_run(folder: Path) -> None:
    """Delete an earlier run's folder; refuse a folder that is not a run's."""
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / "deck.toml").exists():
            raise HpctrainError(f"--fresh: {folder} holds no run (no deck.toml), so it is not removed")
        with lock_folder(folder):
            shutil.rmtree(folder)


def lock_folder(folder: Path) -> TextIO:
    """Hold the folder until what this returns is closed, or the process ends, however it ends.

    HpctrainError if another process holds it. Where the file system has no locks, that is logged.
    """
    stream = (folder / LOCK).open("a+", encoding="utf-8")
    try:
        _lock(stream)
    except BlockingIOError:
        stream.seek(0)
        holder = stream.read(200).strip()
        stream.close()
        raise HpctrainError(
            f"{folder}: another job writes to this run folder ({holder or 'unknown'}); "
            "let it end, or choose another run.dir or run.title"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            stream.close()
            raise
        logging.getLogger("hpctrain").warning(
            "%s: this file system has no locks: nothing keeps a second job out of the folder", folder
        )
    job = os.environ.get("SLURM_JOB_ID")
    stream.truncate(0)
    stream.write(f"process {os.getpid()} on {socket.gethostname()}" + (f", Slurm job {job}" if job else ""))
    stream.flush()
    return stream


def is_free(folder: Path) -> bool:
    """Whether no process holds the folder. Where the file system has no locks, it counts as held."""
    try:
        with (folder / LOCK).open(encoding="utf-8") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _lock(stream: TextIO) -> None:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        # Who looks whether it is free holds it for a moment.
        time.sleep(_SECONDS_PER_LOOK)
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
