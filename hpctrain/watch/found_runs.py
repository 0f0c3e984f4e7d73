"""The runs below a folder, known by their files; looked for within bounds."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from hpctrain.comm.error_messages import print_error
from hpctrain.errors import HpctrainError
from hpctrain.watch.run_files import MARKER
from hpctrain.watch.status import STATUS_FILE

DEPTH = 4  # folders below the first one
MOST_RUNS = 1_000
MOST_ENTRIES = 200_000


@dataclass(frozen=True)
class FoundRuns:
    """Folders of runs, that which wrote last first; `all_seen` is false where a bound ended the search."""

    folders: tuple[Path, ...]
    all_seen: bool


def find_runs(root: Path, depth: int = DEPTH) -> FoundRuns:
    """The runs in a folder and below it. What cannot be read, hidden folders and what lies in a run's own
    folder are passed over; links are followed, but no folder is looked at twice.
    """
    found: dict[Path, float] = {}
    seen: set[tuple[int, int]] = set()
    waiting, entries, all_seen = deque([(root, 0)]), 0, True
    while waiting and all_seen:
        folder, level = waiting.popleft()
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as inside:
                below = [each for each in inside if not each.name.startswith(".") or each.name == MARKER]
        except OSError:
            continue
        entries += len(below)
        written = _written({each.name: each for each in below})
        if written is not None:
            found[folder] = written
        elif level < depth:
            waiting += [(folder / each.name, level + 1) for each in below if _is_folder(each)]
        all_seen = entries <= MOST_ENTRIES and len(found) < MOST_RUNS
    all_seen = all_seen or not waiting
    return FoundRuns(tuple(sorted(found, key=lambda each: (-found[each], str(each)))), all_seen)


def runs_below(root: Path) -> list[Path]:
    """The folders of the runs there; HpctrainError where there are none."""
    found = find_runs(root)
    if not found.folders:
        raise HpctrainError(
            f"{root.absolute()}: no run in this folder or up to {DEPTH} levels below it; name run folders, "
            "or change to a folder above them"
        )
    if not found.all_seen:
        print_error(
            f"warning: {root.absolute()}: has too many folders below it, so that only the first "
            f"{len(found.folders)} runs are shown; name the folders of other runs"
        )
    return list(found.folders)


def _written(entries: dict[str, os.DirEntry[str]]) -> float | None:
    """When the run whose folder has these entries wrote its status; None where it is no run's."""
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
