"""Names of a run's checkpoints. Imports nothing heavy."""

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
    """The file of the checkpoint taken after `step` steps."""
    return Path(folder) / f"step-{step:08d}.h5"


def checkpoint_step(path: str | Path) -> int | None:
    """The step that a checkpoint's name tells; None for another file's name."""
    match = _NAME.fullmatch(Path(path).name)
    return int(match[1]) if match else None


def checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints in a folder, good or not, newest first; none if there is no such folder.

    Those written before one of an earlier step come last: a run went back to that.
    """
    left = _left(Path(folder))
    return sorted(left, key=lambda path: (not left[path], checkpoint_step(path)), reverse=True)


def current_checkpoints(folder: str | Path) -> list[Path]:
    """As `checkpoints`, without those that a run left behind when it went back."""
    left = _left(Path(folder))
    return [path for path in checkpoints(folder) if not left.get(path, True)]


def _left(folder: Path) -> dict[Path, bool]:
    """Of each checkpoint whether a run went back to an earlier step after it was written.

    Times of copies tell less: where one of an earlier step is younger than what `latest` leads to, only what
    lies beyond can have been left.
    """
    paths = folder.iterdir() if folder.is_dir() else ()
    steps = {path: step for path in paths if (step := checkpoint_step(path)) is not None}
    latest = folder / Path(os.path.realpath(folder / LATEST)).name
    times: dict[Path, int] = {}
    for path in steps:
        with suppress(OSError):  # a run deletes old ones at any time
            times[path] = path.lstat().st_mtime_ns
    last = times.get(latest, 0)
    copies = any(times.get(path, 0) > last for path in steps if steps[path] < steps.get(latest, 1 << 62))
    rising = sorted(steps, key=lambda path: steps[path])
    telling = (0 if copies and path != latest else times.get(path, 0) for path in rising)
    youngest = dict(zip(rising, accumulate(telling, max), strict=True))
    return {path: times.get(path, 0) < youngest[path] for path in steps}
