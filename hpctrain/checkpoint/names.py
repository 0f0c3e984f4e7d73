"""Names and order of a run's checkpoints. The module imports no large library."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

LATEST = "latest"
"""Name of the link that leads to the newest checkpoint, each of which was verified when it was written."""

BEST = "best"
"""Name of the link that leads to the checkpoint with the lowest loss of an evaluation, if one is kept."""

_NAME = re.compile(r"step-(\d{8,})\.h5")


def checkpoint_path(folder: str | Path, step: int) -> Path:
    """Return the path of the checkpoint of a step in a folder."""
    return Path(folder) / f"step-{step:08d}.h5"


def checkpoint_step(path: str | Path) -> int | None:
    """Return the step in the name of a checkpoint; None if a file has another name."""
    match = _NAME.fullmatch(Path(path).name)
    return int(match[1]) if match else None


def checkpoints(folder: str | Path) -> list[Path]:
    """Return the checkpoints in a folder, complete or not, newest first; none if there is no such folder.

    Abandoned ones come last: they were written before a run returned to an earlier step.
    """
    abandoned = _find_abandoned(Path(folder))
    return sorted(abandoned, key=lambda path: (not abandoned[path], checkpoint_step(path)), reverse=True)


def current_checkpoints(folder: str | Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first, without abandoned ones (see `checkpoints`)."""
    abandoned = _find_abandoned(Path(folder))
    return [path for path in checkpoints(folder) if not abandoned.get(path, True)]


def _find_abandoned(folder: Path) -> dict[Path, bool]:
    """Return for each checkpoint True if a run returned to an earlier step after it was written.

    The modification times of files determine this. If a checkpoint of an earlier step is newer than the one
    that `latest` points to, files were copied, and only checkpoints after `latest` can be abandoned.
    """
    paths = folder.iterdir() if folder.is_dir() else ()
    steps = {path: step for path in paths if (step := checkpoint_step(path)) is not None}
    latest = folder / Path(os.path.realpath(folder / LATEST)).name
    times: dict[Path, int] = {}
    for path in steps:
        with suppress(OSError):  # a run deletes old ones at any time
            times[path] = path.lstat().st_mtime_ns
    last = times.get(latest, 0)
    were_copied = any(times.get(path, 0) > last for path in steps if steps[path] < steps.get(latest, 1 << 62))
    by_step = sorted(steps, key=lambda path: steps[path])
    valid_times = (0 if were_copied and path != latest else times.get(path, 0) for path in by_step)
    newest_so_far = dict(zip(by_step, accumulate(valid_times, max), strict=True))
    return {path: times.get(path, 0) < newest_so_far[path] for path in steps}
