"""Plain files that file formats are compared with, the page cache, and the peak of memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpctrain.errors import InputOutputError
from hpctrain.files import descriptor_of, flush_to_disk
from hpctrain.host.memory import peak_rss_bytes, resident_bytes

BLOCK_BYTES = 16 << 20
_CLEAR_REFS = Path("/proc/self/clear_refs")


def write_plain(path: Path, count: int) -> None:
    """Write `count` bytes into a new file in blocks, and flush them to the disk."""
    block = memoryview(bytearray(min(count, BLOCK_BYTES)))
    with path.open("wb", buffering=0) as stream:
        for first in range(0, count, BLOCK_BYTES):
            stream.write(block[: count - first])
        os.fsync(stream.fileno())


def read_plain(paths: Sequence[Path], count: int) -> None:
    """Read `count` bytes in blocks, from the first file on.

    Raises:
        InputOutputError: The files together have fewer bytes.
    """
    block = memoryview(bytearray(min(count, BLOCK_BYTES)))
    for path in paths:
        with path.open("rb", buffering=0) as stream:
            while count and (done := stream.readinto(block[:count])):
                count -= done
    if count:
        raise InputOutputError(f"{paths[-1]}: ends {count} bytes before the expected end")


def drop_from_cache(folder: Path) -> None:
    """Flush the files of a folder to the disk, and drop them from the page cache of this node."""
    for path in folder.rglob("*"):
        if path.is_file():
            flush_to_disk(path)
            with descriptor_of(path) as descriptor:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class PeakMemory:
    """Resident memory of this process between construction and `stop`.

    Attributes:
        before: Resident bytes at construction; None if the system does not let a process reset its peak.
        peak: Highest resident bytes until `stop`; None before.
    """

    def __init__(self) -> None:
        self.before: int | None = None
        self.peak: int | None = None
        with suppress(OSError):
            _CLEAR_REFS.write_text("5", encoding="ascii")
            self.before = resident_bytes()

    def stop(self, beyond: PeakMemory | None = None) -> int | None:
        """Record the peak, and return by how many bytes it exceeds a reference.

        Args:
            beyond: Measurement whose peak is the reference; None for the memory at construction.

        Returns:
            Bytes; None if the system does not let a process reset its peak.
        """
        before = self.before if beyond is None else beyond.peak
        if self.before is None or before is None:
            return None
        self.peak = peak_rss_bytes()
        return max(0, self.peak - before)
