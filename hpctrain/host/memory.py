"""The memory of this process and of the node it is on: what it holds, what it may hold, and its end."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hpctrain.host.mpi_library import MPI
from hpctrain.units import format_bytes

_KEPT_BYTES = 32 << 20
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as <malloc.h> names what mallopt changes

ROOT = Path("/")  # where /proc and the file systems of cgroups are looked for
UNLIMITED = 2**60  # from so many bytes on a limit is none: version 1 of cgroups writes the largest number

_USED = ("memory.current", "memory.usage_in_bytes")  # files of cgroups of version 2 and 1

# In what torch and libraries below it say where they get no memory.
_REFUSALS = re.compile(r"not enough memory|(can't|cannot) allocate memory|bad_alloc", re.IGNORECASE)


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes that some processes of a node share: `pool` tells which of its limits this is, `text` the same in
    words, which stand behind the size: "24 GB of memory".
    """

    pool: str
    bytes: int
    text: str

    def __str__(self) -> str:
        return f"{format_bytes(self.bytes)} {self.text}"


def resident_bytes() -> int:
    """What this process has resident; 0 where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return 0
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes() -> int:
    """The most memory that this process has had resident so far, in bytes.

    Where there is /proc, from there: what `getrusage` tells began with the peak of the process that
    started this one.
    """
    for peak in _sizes("self/status", "VmHWM"):
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def keep_freed_memory() -> bool:
    """Have the C library keep what is freed, but for pieces above 32 MB, the most that it allows.

    Otherwise glibc gives the end of its heap back where enough of it is free, as after every backward pass,
    and takes it again page by page: a tenth of a block's time. Who has set its malloc by the environment is
    left alone, and so are other libraries; whether it keeps.
    """
    own = any(name.startswith("MALLOC_") for name in os.environ)
    if own or "malloc" in os.environ.get("GLIBC_TUNABLES", "") or not _is_glibc():
        return False
    library = ctypes.CDLL(None)
    kept = library.mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
    return bool(kept and library.mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):
        return False


def shared_resident_bytes() -> int:
    """What this process has resident of files and shared memory, such as libraries: other processes of the
    node that use the same have no more of it; 0 where the system does not tell.
    """
    return sum(_sizes("self/status", "RssFile", "RssShmem"))


def proportional_bytes() -> int:
    """What this process has resident, and of what it shares with others its part: ranks that have memory in
    common count it once together. Code and constants of libraries are left out: how many other processes of
    the node happen to use them is nothing of this one's. 0 where the system does not tell.
    """
    pages, counts = 0, False
    # Of each mapping a line with addresses, access, offset, device, inode and perhaps path, then its sizes.
    with (
        contextlib.suppress(OSError),
        (ROOT / "proc/self/smaps").open(encoding="utf-8", errors="replace") as file,
    ):
        for line in file:
            name, *rest = line.split(None, 5)
            if not name.endswith(":"):
                counts = "w" in rest[0] or rest[3] == "0"
            elif counts and name == "Pss:":
                pages += int(rest[0])
    return 1024 * pages


def peak_proportional_bytes() -> int:
    """The most of `proportional_bytes` so far, as far as the peak of what is resident tells."""
    return peak_rss_bytes() - resident_bytes() + proportional_bytes()


def memory_limits(environment: Mapping[str, str]) -> list[MemoryLimit]:
    """What limits the memory of this process and others of its node together, as far as the system tells:
    the node's memory, each cgroup that it is in, and what Slurm has given the job.
    """
    limits = [MemoryLimit("node", total, "of memory") for total in _sizes("meminfo", "MemTotal")]
    limits += [MemoryLimit(f"cgroup {name}", size, f"for the cgroup {name}") for name, size, _ in _cgroups()]
    limits += [MemoryLimit(name, size, f"for this job ({name})") for name, size in _slurm(environment)]
    return limits


def available_bytes() -> int | None:
    """What the node could give without pushing out what others hold; None where the system does not tell."""
    return next(iter(_sizes("meminfo", "MemAvailable")), None)


def obtainable_bytes(environment: Mapping[str, str]) -> int | None:
    """What processes of this node could still take together, without others losing theirs or a limit ending
    them: of each cgroup, what is not used there but for files that were read; None where the system does not
    tell.
    """
    available = available_bytes()
    if available is None:
        return None
    left = [available, *(size for _, size in _slurm(environment))]
    for _, size, folder in _cgroups():
        used = next((int(text) for name in _USED if (text := _read(folder / name).strip()).isdigit()), 0)
        files = re.search(r"^(?:total_)?inactive_file (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
        left.append(max(0, size - used + (min(used, int(files[1])) if files else 0)))
    return min(left)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, of whatever library, says that there was no memory to be had."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MPI.Exception):
        return bool(error.Get_error_class() == MPI.ERR_NO_MEM)
    return isinstance(error, RuntimeError) and _REFUSALS.search(str(error)) is not None


def _sizes(file: str, *names: str) -> list[int]:
    """Lines of these names of a file of /proc, in bytes."""
    lines = re.findall(rf"^(?:{'|'.join(names)}):\s+(\d+) kB$", _read(ROOT / "proc" / file), re.MULTILINE)
    return [1024 * int(size) for size in lines]


def _cgroups() -> Iterator[tuple[str, int, Path]]:
    """The limits of the cgroups that this process is in and of those above them, with their names, and where
    the system tells of them.
    """
    mounts = _mounts()
    for line in _read(ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        kind = "cgroup2" if not controllers else "cgroup"
        if kind == "cgroup" and "memory" not in controllers.split(","):
            continue
        file = "memory.max" if kind == "cgroup2" else "memory.limit_in_bytes"
        for top, mounted in mounts.get(kind, ()):
            # In a container the file system may begin at this process's own cgroup, or at one above it.
            inside = path.removeprefix(top) if top != "/" else path
            here = mounted / inside.strip("/")
            if not here.is_dir() or ".." in Path(inside).parts:
                here = mounted
            while True:
                value = _read(here / file).strip()
                if value.isdigit() and int(value) < UNLIMITED:
                    yield f"/{here.relative_to(mounted)}".replace("/.", "/"), int(value), here
                if here == mounted:
                    break
                here = here.parent


def _mounts() -> dict[str, list[tuple[str, Path]]]:
    """Mounts of cgroups that limit memory, by kind of file system: the cgroup at the top, and where."""
    mounts: dict[str, list[tuple[str, Path]]] = {}
    for line in _read(ROOT / "proc/self/mountinfo").splitlines():
        where, _, kind = line.partition(" - ")
        left, right = where.split(), kind.split()
        if len(left) < 5 or len(right) < 3:
            continue
        if right[0] == "cgroup2" or (right[0] == "cgroup" and "memory" in right[2].split(",")):
            mounts.setdefault(right[0], []).append((left[3], ROOT / left[4].lstrip("/")))
    return mounts


def _slurm(environment: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """What Slurm has given this job on this node: by node, by core or by GPU, in its variables in MiB."""
    counts = {
        "SLURM_MEM_PER_NODE": "1",
        "SLURM_MEM_PER_CPU": environment.get("SLURM_CPUS_ON_NODE", ""),
        "SLURM_MEM_PER_GPU": environment.get("SLURM_GPUS_ON_NODE", ""),
    }
    for name, count in counts.items():
        size = environment.get(name, "")
        if size.isdigit() and count.isdigit() and int(size) * int(count):  # 0 stands for all there is
            yield name, (int(size) * int(count)) << 20


def _read(path: Path) -> str:
    """A small file's text; "" where it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20)
    except OSError:
        return ""
