"""Choice of the newest valid checkpoint, deletion of old ones, and links to checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.checkpoint.agree import raise_on_all_ranks
from hpctrain.checkpoint.checkpoint_index import examine
from hpctrain.checkpoint.names import BEST, LATEST, checkpoint_step, checkpoints, current_checkpoints
from hpctrain.checkpoint.verify_checksums import verify
from hpctrain.comm.group import Group
from hpctrain.errors import HpctrainError, InputOutputError, failing_as


def list_checkpoints(folder: str | Path, group: Group, current: bool = False) -> list[Path]:
    """Return the checkpoints of a folder as rank 0 finds them, newest first. Collective.

    Args:
        folder: The folder.
        group: The ranks.
        current: True to leave out abandoned checkpoints, as `current_checkpoints` does.

    Raises:
        InputOutputError: The folder cannot be read.
    """
    names: list[str] = []
    with raise_on_all_ranks(group):
        if group.rank == 0:
            names = [path.name for path in (current_checkpoints if current else checkpoints)(folder)]
    return [Path(folder) / name for name in group.broadcast_object(names)]


def newest_valid(folder: str | Path, group: Group, strict: bool = False) -> tuple[Path | None, list[str]]:
    """Return the newest valid checkpoint, and a warning for each newer one that is not valid. Collective.

    The ranks read each candidate completely and compare its checksums. All ranks return the same.

    Args:
        folder: The folder.
        group: The ranks.
        strict: True to raise the error of the newest checkpoint if it is not valid.

    Raises:
        InputOutputError: The folder cannot be read, or as `strict` says.
    """
    warnings: list[str] = []
    for path in list_checkpoints(folder, group):
        try:
            verify(path, group)
        except HpctrainError as error:
            if strict:
                raise
            warnings += [f"{problem}; skipped" for problem in error.problems]
        else:
            return path, warnings
    return None, warnings


def delete_old_checkpoints(folder: str | Path, count: int, group: Group, every: int = 0) -> list[Path]:
    """Delete the checkpoints that are older than the newest valid ones. Collective; rank 0 deletes.

    The index and the state of a checkpoint determine whether it is valid, since its tensors were compared
    when they were written. Nothing is deleted if there are fewer than `count` valid checkpoints. That to
    which the link `best` points is never deleted.

    Args:
        folder: The folder.
        count: Number of the newest valid checkpoints that are not deleted.
        group: The ranks.
        every: Checkpoints of each `every`-th step are not deleted either; 0 for none.

    Returns:
        The deleted files on rank 0; nothing on other ranks.

    Raises:
        InputOutputError: A file cannot be deleted. The other files are deleted first.
    """
    assert count >= 1, count
    deleted: list[Path] = []
    failures: list[str] = []
    with raise_on_all_ranks(group):
        if group.rank == 0:
            valid, best = 0, link_target(folder, BEST)
            for path in checkpoints(folder):
                if valid < count:
                    valid += is_complete(path)
                elif path.is_symlink() or not path.is_file() or path.name == best:
                    continue  # no run has written it, or it is the best one
                elif not every or (checkpoint_step(path) or 0) % every:
                    try:
                        path.unlink()
                    except OSError as error:
                        failures.append(f"{path}: cannot be deleted: {error.strerror or error}")
                    else:
                        deleted.append(path)
            if failures:
                raise InputOutputError(failures)
    return deleted


def link_target(folder: str | Path, name: str) -> str:
    """Return the name of the file that a link in a folder points to; "" if there is no such link."""
    link = Path(folder) / name
    return link.readlink().name if link.is_symlink() else ""


def remove_link(folder: str | Path, name: str) -> None:
    """Remove a symbolic link from a folder if there is one of this name."""
    if (link := Path(folder) / name).is_symlink():
        link.unlink()


def point_to(path: Path, group: Group, name: str = LATEST) -> None:
    """Let the symbolic link `name` in the folder of a checkpoint point to it. Collective; rank 0 does it.

    Raises:
        InputOutputError: The link cannot be made, for example since the file system has no links.
    """
    link = path.with_name(name)
    with raise_on_all_ranks(group), failing_as(f"{link}: cannot link to {path.name}"):
        if group.rank == 0:
            fresh = path.with_name(f".{name}.tmp")
            if link.exists() and not link.is_symlink():
                return  # a file that no run has written
            if fresh.is_symlink():
                fresh.unlink()
            fresh.symlink_to(path.name)
            fresh.replace(link)


@contextmanager
def log_io_errors() -> Iterator[None]:
    """Log an InputOutputError of the block as warnings instead of raising it, for steps that may fail."""
    try:
        yield
    except InputOutputError as error:
        for problem in error.problems:
            logging.getLogger("hpctrain").warning("%s; the run continues", problem)


def try_point_to(path: Path, group: Group, name: str = LATEST) -> None:
    """Let a link point to a checkpoint as `point_to` does; log a warning if that fails. Collective."""
    with log_io_errors():
        point_to(path, group, name)


def is_complete(path: Path) -> bool:
    """Return True if the index and the state of a checkpoint are valid. This reads no tensors."""
    try:
        examine(path)
    except HpctrainError:
        return False
    return True
