"""Test of the disk: write files, flush them to the disk, read them back, compare and time them."""

from __future__ import annotations

import errno
import os
import re
import socket
from contextlib import suppress
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from hpctrain.comm.error_messages import error_reason
from hpctrain.files import descriptor_of
from hpctrain.units import format_bytes
from hpctrain.watch.stress.difference import difference
from hpctrain.watch.stress.random_words import key, random_words
from hpctrain.watch.stress.record import ResultHook, StressRank, StressRecord, TestTime

TEST = "disk"
FIRST = 8 << 20
"""Bytes of the first file. The size doubles while there is time for it."""

MOST = 1 << 30
SHARE = 0.25
"""Share of the free space that the files of all ranks may have."""

_BLOCK = 1 << 20
_NAME = re.compile(r"hpctrain-stress-(?P<host>.+)-(?P<process>\d+)-rank\d+\.tmp")
_FULL = {errno.ENOSPC, errno.EDQUOT}


def remove_leftovers(folder: Path) -> list[str]:
    """Remove the files that killed tests left on this node, and return their names."""
    removed = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            is_from_here = match and match["host"] == _host() and entry.is_file(follow_symlinks=False)
            if match and is_from_here and not _is_running(int(match["process"])):
                with suppress(OSError):
                    os.unlink(entry.path)  # noqa: PTH108  (a name that was just listed)
                    removed.append(entry.name)
    return removed


class DiskTest:
    """Test of the disk of a folder.

    Args:
        this_rank: This rank.
        folder: The folder.
        ranks: Number of ranks that write at the same time.
        most: Largest size of a file in bytes.
        on_result: Function that is called with each block before it is compared.
    """

    def __init__(
        self, this_rank: StressRank, folder: Path, ranks: int, most: int, on_result: ResultHook
    ) -> None:
        self.this_rank, self.folder, self.ranks, self.most, self.on_result = (
            this_rank,
            folder,
            ranks,
            most,
            on_result,
        )
        self._path = folder / f"hpctrain-stress-{_host()}-{os.getpid()}-rank{this_rank.rank}.tmp"
        self._words = random_words(_BLOCK // 8, seed=this_rank.rank)
        self._size = min(FIRST, most)

    def run(self, record: StressRecord, test_time: TestTime, number: int) -> None:
        """Write and read files until the time is over. The rates are those of the last file."""
        while True:
            start = perf_counter()
            try:
                most, free = self._free_space()
                if most < min(FIRST, self.most):
                    text = f"not tested: {self.folder} has {format_bytes(free)} left for {self.ranks} ranks"
                    record.notes.append((TEST, text))
                    return
                self._once(min(self._size, most), number, record, test_time)
            except OSError as error:
                self._failed(error, record)
                return
            finally:
                with suppress(OSError):
                    self._path.unlink(missing_ok=True)
            took = perf_counter() - start
            if test_time.left < took:
                return
            if test_time.left > 3 * took:
                self._size = min(2 * self._size, most)

    def _free_space(self) -> tuple[int, int]:
        """Return the largest size of a file, and the free space, in bytes."""
        status = os.statvfs(self.folder)
        free = status.f_bavail * status.f_frsize
        return min(self.most, int(SHARE * free) // self.ranks) // _BLOCK * _BLOCK, free

    def _once(self, size: int, number: int, record: StressRecord, test_time: TestTime) -> None:
        blocks = range(size // _BLOCK)
        scratch = torch.empty_like(self._words)
        start = perf_counter()
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with descriptor_of(self._path, flags) as descriptor:
            for index in blocks:
                self._write(descriptor, self._block(index, number, scratch))
                if test_time.stopped():
                    return
            os.fsync(descriptor)
            written = perf_counter()
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.lseek(descriptor, 0, os.SEEK_SET)
            reading = perf_counter()
            actual = torch.empty_like(self._words)
            for index in blocks:
                count = self._read(descriptor, actual)
                self.on_result(TEST, actual)
                self._compare(actual, self._block(index, number, scratch), index, count, record)
                if test_time.stopped():
                    return
            record.rates["disk write"] = size / (written - start)
            record.rates["disk read"] = size / (perf_counter() - reading)

    def _block(self, index: int, number: int, memory: Tensor) -> Tensor:
        return torch.bitwise_xor(self._words, key(number, index), out=memory)

    @staticmethod
    def _write(descriptor: int, block: Tensor) -> None:
        rest = block.numpy().view(np.uint8).data
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    @staticmethod
    def _read(descriptor: int, block: Tensor) -> int:
        rest = block.numpy().view(np.uint8).data
        while rest and (count := os.readv(descriptor, [rest])):
            rest = rest[count:]
        return block.nbytes - len(rest)

    def _compare(
        self, actual: Tensor, expected: Tensor, index: int, count: int, record: StressRecord
    ) -> None:
        where = f"{self.this_rank.name}: {self.folder}"
        host = self.this_rank.hosts[self.this_rank.rank]
        if count < actual.nbytes:
            record.add_wrong(
                TEST, f"{where} returned only {index * _BLOCK + count} bytes of a larger file", host
            )
            return
        wrong_bits = difference(actual.view(torch.uint8), expected.view(torch.uint8))
        if wrong_bits is not None:
            place = index * _BLOCK + wrong_bits.position
            record.add_wrong(TEST, f"{where} returned byte {place} of a file as {wrong_bits}", host)

    def _failed(self, error: OSError, record: StressRecord) -> None:
        if error.errno in _FULL:
            record.notes.append((TEST, f"not tested: {self.folder} is full"))
            return
        text = f"{self.this_rank.name}: {self.folder} cannot be written or read back: {error_reason(error)}"
        record.add_wrong(TEST, text, self.this_rank.hosts[self.this_rank.rank])


def _host() -> str:
    return socket.gethostname().replace("/", "_")


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
