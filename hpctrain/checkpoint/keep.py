"""Names of a run's checkpoints, the newest good one, and which ones to keep."""

from __future__ import annotations

import re
from pathlib import Path

from hpctrain.checkpoint.agree import together
from hpctrain.checkpoint.structure import examine
from hpctrain.checkpoint.verify import verify
from hpctrain.comm.group import Group
from hpctrain.errors import HpctrainError

LATEST = "latest"
"""Name of the link that leads to the newest checkpoint, each of which was verified when it was written."""

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
    found = [(step, path) for path in _listed(folder) if (step := checkpoint_step(path)) is not None]
    return [path for _, path in sorted(found, reverse=True)]


def newest_good(
    folder: str | Path, group: Group, thorough: bool = True, strict: bool = False
) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and a warning for every newer one that is not; collective.

    `thorough` reads each candidate, spread over the ranks, and compares all its checksums; otherwise only
    its structure and state are looked at. All ranks return the same. InputOutputError if the folder
    cannot be listed or, with `strict`, if the newest one is not whole.
    """
    names: list[str] = []
    with together(group):
        if group.rank == 0:
            names = [path.name for path in checkpoints(folder)]
    warnings: list[str] = []
    for name in group.broadcast_object(names):
        path = Path(folder) / name
        try:
            if thorough:
                verify(path, group)
            else:
                examine(path, group)
        except HpctrainError as error:
            if strict:
                raise
            warnings += [f"{problem}; passed over" for problem in error.problems]
        else:
            return path, warnings
    return None, warnings


def keep(folder: str | Path, count: int, group: Group, every: int = 0) -> list[Path]:
    """Delete the checkpoints older than the `count` newest good ones; collective, rank 0 deletes.

    Those of every `every`-th step stay. Call it after a save. A checkpoint counts as good if its structure
    and state are (its data was compared when it was written). Fewer than `count` good ones: nothing is
    deleted. Returns, on rank 0, what was deleted. InputOutputError if something cannot be deleted.
    """
    assert count >= 1, count
    deleted: list[Path] = []
    with together(group):
        if group.rank == 0:
            good = 0
            for path in checkpoints(folder):
                if good < count:
                    good += _whole(path)
                elif not every or (checkpoint_step(path) or 0) % every:
                    path.unlink()
                    deleted.append(path)
    return deleted


def point_to(path: Path, group: Group) -> None:
    """Let the link `latest` beside a checkpoint lead to it; collective, rank 0 does it."""
    with together(group):
        if group.rank == 0:
            fresh = path.with_name(f".{LATEST}.tmp")
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(path.name)
            fresh.replace(path.with_name(LATEST))


def _whole(path: Path) -> bool:
    try:
        examine(path)
    except HpctrainError:
        return False
    return True


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
