"""Files that have to survive a crash."""

from __future__ import annotations

import os
from pathlib import Path


def synchronize(path: Path) -> None:
    """Bring a file or folder, as this node knows it, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
