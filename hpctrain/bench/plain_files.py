"""What a benchmark of files needs: plain files to compare with, an empty page cache, the peak of memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpctrain.errors import InputOutputError
from hpctrain.files import descriptor_of, flush_to_disk
from hpctrain.host.memory import peak_rss_bytes, resident_bytes

BLOCK_BYTES = 16 << 20
_REFERENCES = Path("/proc/self/clear_refs")


def write_plainly(path: Path, count: int) -> None:
    """Write `count` bytes into a new file, one block after another, and bring them to the disk."""
    block = memoryview(bytearray(min(count, BLOCK_BYTES)))
    with path.open("wb", buffering=0) as stream:
        for first in range(0, count, BLOCK_BYTES):
            stream.write(block[: count - first])
        os.fsync(stream.fileno())


def read_plainly(paths: Sequence[Path], count: int) -> None:
    """Read `count` bytes of files in turn, one block after another; those of the last are enough."""
    block = memoryview(bytearray(min(count, BLOCK_BYTES)))
    for path in paths:
        with path.open("rb", buffering=0) as stream:
            while count and (done := stream.readinto(block[:count])):
                count -= done
    if count:
        raise InputOutputError(f"{paths[-1]}: ends {count} bytes before the expected end")


def forget(folder: Path) -> None:
    """Bring the files of a folder to the disk, and take them out of this node's page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            flush_to_disk(path)
            with descriptor_of(path) as descriptor:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class PeakMemory:
    """The resident memory of this process from here to `stop`, in bytes: at the beginning and at its peak.

    None where the system does not let a process forget its peak.
    """

    def __init__(self) -> None:
        self.before: int | None = None
        self.peak: int | None = None
        with suppress(OSError):
            _REFERENCES.write_text("5", encoding="ascii")
            self.before = resident_bytes()

    def stop(self, beyond: PeakMemory | None = None) -> int | None:
        """Take the peak; what it is beyond the beginning, or beyond another peak."""
        before = self.before if beyond is None else beyond.peak
        if self.before is None or before is None:
            return None
        self.peak = peak_rss_bytes()
        return max(0, self.peak - before)
