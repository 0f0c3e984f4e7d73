"""Versions of hpctrain and its libraries, and the git commit of hpctrain."""

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
    """Return the versions by name, first that of hpctrain."""
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
    """Return the git commit of the repository of hpctrain; None if hpctrain is not in a repository."""
    return commit_of(Path(hpctrain.__file__).resolve().parents[1])


def commit_of(repository: Path) -> str | None:
    """Return the commit that is checked out in a folder with `.git`; None if it is unknown.

    Parent folders are not searched, since an installed package may be inside of another repository.
    """
    try:
        git = repository / ".git"
        if git.is_file():  # a worktree or a submodule
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
