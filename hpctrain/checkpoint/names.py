"""Names of a run's checkpoints. Imports nothing heavy."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"step-(\d{8,})\.h5")


def checkpoint_path(folder: str | Path, step: int) -> Path:
    """The file of the checkpoint taken after `step` steps."""
    return Path(folder) / f"step-{step:08d}.h5"


def checkpoint_step(path: str | Path) -> int | None:
    """The step that a checkpoint's name tells; None for another file's name."""
    match = _NAME.fullmatch(Path(path).name)
    return int(match[1]) if match else None


def checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints in a folder, good or not, newest first; none if there is no such folder."""
    folder = Path(folder)
    paths = folder.iterdir() if folder.is_dir() else ()
    steps = [(step, path) for path in paths if (step := checkpoint_step(path)) is not None]
    return [path for _, path in sorted(steps, reverse=True)]
