"""The newest good checkpoint of a run, and which ones to keep."""

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


def list_checkpoints(folder: str | Path, group: Group, present: bool = False) -> list[Path]:
    """The checkpoints of a folder as rank 0 sees them, newest first, without those that were left behind if
    only `present` ones are asked for; collective. Raises InputOutputError.
    """
    names: list[str] = []
    with raise_on_all_ranks(group):
        if group.rank == 0:
            names = [path.name for path in (current_checkpoints if present else checkpoints)(folder)]
    return [Path(folder) / name for name in group.broadcast_object(names)]


def newest_good(folder: str | Path, group: Group, strict: bool = False) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint, and a warning for every newer one that is not; collective.

    Each candidate is read, spread over the ranks, and all its checksums are compared. All ranks return the
    same. InputOutputError if the folder cannot be listed or, with `strict`, if the newest is not complete.
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
    """Delete the checkpoints older than the `count` newest good ones; collective, rank 0 deletes.

    Those of every `every`-th step stay, and that to which the link `best` leads. Call it after a save. A
    checkpoint counts as good if its structure and state are (its data was compared when it was written).
    Fewer than `count` good ones: nothing is deleted. Returns, on rank 0, what was deleted. InputOutputError
    if something cannot be deleted, after the rest was.
    """
    assert count >= 1, count
    deleted: list[Path] = []
    failures: list[str] = []
    with raise_on_all_ranks(group):
        if group.rank == 0:
            good, best = 0, link_target(folder, BEST)
            for path in checkpoints(folder):
                if good < count:
                    good += is_complete(path)
                elif path.is_symlink() or not path.is_file() or path.name == best:
                    continue  # not written by a run, or to stay
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
    """Which file of the folder a link in it leads to; "" where there is no such link."""
    link = Path(folder) / name
    return link.readlink().name if link.is_symlink() else ""


def remove_link(folder: str | Path, name: str) -> None:
    """Remove a link, if it is there and is one."""
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
                return  # a file of somebody else's
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
    """Whether its structure and state are good; of its data nothing is read."""
    try:
        examine(path)
    except HpctrainError:
        return False
    return True
