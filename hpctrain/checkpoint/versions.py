"""Which code runs here: versions of the package and its libraries, and the package's git commit."""

from __future__ import annotations

import platform
import re
from functools import cache
from pathlib import Path

import h5py
import numpy as np
import torch

import hpctrain

_COMMIT = re.compile(r"[0-9a-f]{40,64}")


def library_versions() -> dict[str, str]:
    """Versions by name, hpctrain's own first."""
    return {
        "hpctrain": hpctrain.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "h5py": h5py.__version__,
        "hdf5": h5py.version.hdf5_version,
    }


@cache
def package_commit() -> str | None:
    """The git commit that the package's own repository has checked out; None where it is not in one."""
    return commit_of(Path(hpctrain.__file__).resolve().parents[1])


def commit_of(repository: Path) -> str | None:
    """The commit checked out in a folder that holds `.git`, as git's files tell; None where they do not.

    Folders above are not asked: an installed package may lie in a repository of something else.
    """
    try:
        git = repository / ".git"
        if git.is_file():  # of a worktree or a submodule
            git = repository / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref:"):
            return _hash(head)
        reference = head.removeprefix("ref:").strip()
        shared = git / "commondir"
        common = git / shared.read_text(encoding="utf-8").strip() if shared.is_file() else git
        for folder in (git, common):
            if (folder / reference).is_file():
                return _hash((folder / reference).read_text(encoding="utf-8").strip())
        packed = (common / "packed-refs").read_text(encoding="utf-8").splitlines()
        rows = (line.partition(" ") for line in packed)
        return next((_hash(commit) for commit, _, name in rows if name == reference), None)
    except (OSError, UnicodeDecodeError):
        return None


def _hash(text: str) -> str | None:
    return text if _COMMIT.fullmatch(text) else None
