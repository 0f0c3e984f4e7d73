"""Search for run folders below a folder, with limits on depth and number."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from hpctrain.comm.error_messages import print_error
from hpctrain.errors import HpctrainError
from hpctrain.watch.run_files import MARKER
from hpctrain.watch.status import STATUS_FILE

DEPTH = 4
"""Levels of folders that are searched below the first one."""

MOST_RUNS = 1_000
MOST_ENTRIES = 200_000


@dataclass(frozen=True)
class RunSearch:
    """Result of a search for runs.

    Attributes:
        folders: Run folders. The one that wrote its status last comes first.
        is_complete: False if a limit ended the search.
    """

    folders: tuple[Path, ...]
    is_complete: bool


def find_runs(root: Path, depth: int = DEPTH) -> RunSearch:
    """Find the runs in a folder and below it.

    Unreadable folders, hidden folders and folders inside of a run folder are skipped. Links are followed, but
    no folder is searched twice.

    Args:
        root: The folder.
        depth: Levels below it that are searched.
    """
    status_times: dict[Path, float] = {}
    searched: set[tuple[int, int]] = set()
    waiting, entries, is_complete = deque([(root, 0)]), 0, True
    while waiting and is_complete:
        folder, level = waiting.popleft()
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in searched:
                continue
            searched.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as inside:
                below = [each for each in inside if not each.name.startswith(".") or each.name == MARKER]
        except OSError:
            continue
        entries += len(below)
        written = _status_time({each.name: each for each in below})
        if written is not None:
            status_times[folder] = written
        elif level < depth:
            waiting += [(folder / each.name, level + 1) for each in below if _is_folder(each)]
        is_complete = entries <= MOST_ENTRIES and len(status_times) < MOST_RUNS
    is_complete = is_complete or not waiting
    return RunSearch(
        tuple(sorted(status_times, key=lambda each: (-status_times[each], str(each)))), is_complete
    )


def runs_below(root: Path) -> list[Path]:
    """Return the run folders in a folder and below it. Warn if a limit ended the search.

    Raises:
        HpctrainError: There are none.
    """
    search = find_runs(root)
    if not search.folders:
        raise HpctrainError(
            f"{root.absolute()}: no run in this folder or up to {DEPTH} levels below it; name run folders, "
            "or change to a folder above them"
        )
    if not search.is_complete:
        print_error(
            f"warning: {root.absolute()}: has too many folders below it, so that only the first "
            f"{len(search.folders)} runs are shown; name the folders of other runs"
        )
    return list(search.folders)


def _status_time(entries: dict[str, os.DirEntry[str]]) -> float | None:
    """Return when the run in a folder with these entries wrote its status; None if it is not a run folder."""
    status = entries.get(STATUS_FILE)
    if status is None or not (MARKER in entries or "deck.toml" in entries):
        return None
    try:
        return status.stat().st_mtime if status.is_file() else None
    except OSError:
        return None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False
