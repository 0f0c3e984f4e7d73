"""Memory of this process and of its node: what is used, what is available, and what limits it."""

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

from hpctrain.host.tensor_heap.tensor_heap import malloc_variable, release_tensor_heap
from hpctrain.units import format_bytes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>

ROOT = Path("/")
"""Folder that contains /proc and the file systems of cgroups."""

_LARGEST_KEPT = 32 << 20
"""Largest block, in bytes, that glibc keeps when it is freed, after `keep_freed_memory`."""

UNLIMITED = 2**60
"""Bytes from which on a limit counts as none. Cgroups of version 1 give a large number for no limit."""

_USED = ("memory.current", "memory.usage_in_bytes")
"""Files with the used memory of a cgroup, in versions 2 and 1."""

# Texts by which torch and the libraries that it uses report that memory has run out.
_OUT_OF_MEMORY_TEXTS = re.compile(
    r"not enough memory|(can't|cannot) allocate memory|bad_alloc|can't start new thread", re.IGNORECASE
)


@dataclass(frozen=True)
class MemoryLimit:
    """Memory limit that some processes of a node share.

    Attributes:
        pool: Identity of the limit: "node", a cgroup, a GPU, or a variable of Slurm. Processes of a node with
            the same pool share the limit.
        bytes: The limit in bytes.
        text: Phrase that follows the size in messages, such as "for this job (SLURM_MEM_PER_NODE)".
    """

    pool: str
    bytes: int
    text: str

    def __str__(self) -> str:
        return f"{format_bytes(self.bytes)} {self.text}"


def resident_bytes() -> int:
    """Return the present resident memory (RSS) of this process, in bytes; 0 on systems other than Linux."""
    if not sys.platform.startswith("linux"):
        return 0
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process in bytes.

    The value comes from /proc if there is one, otherwise from `getrusage`. The latter may be too large, since
    Linux starts it with the peak of the parent process.
    """
    for peak in _sizes("self/status", "VmHWM"):
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory, except blocks above 32 MB.

    By default glibc returns memory to the system after every backward pass and gets it again page by page,
    which costs a tenth of the time of a transformer block. It may be called at any time, and holds for memory
    that is freed afterwards. Nothing changes if the user has configured malloc by environment variables, or
    if the C library is not glibc.

    Returns:
        True if the C library keeps freed memory from now on.
    """
    if malloc_variable(os.environ) or not _is_glibc():
        return False
    library = ctypes.CDLL(None)
    is_set = library.mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
    return bool(is_set and library.mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def release_freed_memory() -> None:
    """Return the free memory of the heap of tensors and of malloc to the system. Local.

    A run calls it after it has measured kernels and before it builds its model. Later tensors may not fit
    into the gaps that the measurements left, which would count as used memory until the process ends. Of
    malloc's memory, only that of glibc is returned.
    """
    release_tensor_heap()
    if sys.platform.startswith("linux") and _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _is_glibc() -> bool:
    """Return True if the C library is glibc."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):
        return False


def shared_resident_bytes() -> int:
    """Return the resident memory of this process that files and shared memory back, in bytes.

    Processes of the node that use the same libraries share this memory. 0 if it is unknown.
    """
    return sum(_sizes("self/status", "RssFile", "RssShmem"))


def proportional_bytes() -> int:
    """Return the resident memory of this process in bytes, with its share of pages that it shares.

    A page that n processes share counts as 1/n. Code and constants of libraries are left out, since their
    share depends on other processes of the node.

    Returns:
        The present value; 0 if it is unknown.
    """
    kilobytes, counts = 0, False
    # Each mapping has a line of addresses, access, offset, device, inode and perhaps path, then its sizes.
    with (
        contextlib.suppress(OSError),
        (ROOT / "proc/self/smaps").open(encoding="utf-8", errors="replace") as file,
    ):
        for line in file:
            name, *rest = line.split(None, 5)
            if not name.endswith(":"):
                counts = "w" in rest[0] or rest[3] == "0"
            elif counts and name == "Pss:":
                kilobytes += int(rest[0])
    return 1024 * kilobytes


def peak_proportional_bytes() -> int:
    """Return the peak of `proportional_bytes`, in bytes, since the process started. It is an estimate.

    Linux does not record it, so the present difference from the resident memory is taken from the peak of
    that.
    """
    return peak_rss_bytes() - resident_bytes() + proportional_bytes()


def memory_limits(environment: Mapping[str, str]) -> list[MemoryLimit]:
    """Return the memory limits that this process shares with others of its node. Local.

    These are the memory of the node, the limits of all cgroups that this process is in, and what Slurm
    has allocated to the job on this node. Limits that this process cannot read are left out.

    Args:
        environment: Environment variables, of which those of Slurm are read.
    """
    limits = [MemoryLimit("node", total, "of memory") for total in _sizes("meminfo", "MemTotal")]
    limits += [MemoryLimit(f"cgroup {name}", size, f"for the cgroup {name}") for name, size, _ in _cgroups()]
    limits += [MemoryLimit(name, size, f"for this job ({name})") for name, size in _slurm(environment)]
    return limits


def available_bytes() -> int | None:
    """Return the available memory of the node (MemAvailable), in bytes; None if it is unknown.

    Limits of cgroups and Slurm do not count; `obtainable_bytes` includes them.
    """
    return next(iter(_sizes("meminfo", "MemAvailable")), None)


def obtainable_bytes(environment: Mapping[str, str]) -> int | None:
    """Return the bytes that the processes under the limits of this process could still allocate together.

    This is the least of three: the available memory of the node, what each cgroup of this process leaves, and
    the whole memory that Slurm has given the job on this node, used or not. Files in a cgroup that were read
    and can be dropped do not count as used.

    Args:
        environment: Environment variables, of which those of Slurm are read.

    Returns:
        The memory; None if the available memory is unknown.
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
    """Return True if an exception of Python, torch, the system or MPI says that there was not enough memory.

    Local.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # Without MPI, for example in `hpctrain doctor` where mpi4py is broken, no error is one of MPI's.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(error, mpi.Exception):
        return bool(error.Get_error_class() == mpi.ERR_NO_MEM)
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY_TEXTS.search(str(error)) is not None


def _sizes(file: str, *names: str) -> list[int]:
    """Return the values, in bytes, of the lines with these names in a file of /proc."""
    lines = re.findall(rf"^(?:{'|'.join(names)}):\s+(\d+) kB$", _read(ROOT / "proc" / file), re.MULTILINE)
    return [1024 * int(size) for size in lines]


def _cgroups() -> Iterator[tuple[str, int, Path]]:
    """Yield name, limit in bytes and folder of the cgroups of this process and of those above them."""
    mounts = _mounts()
    for line in _read(ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        kind = "cgroup2" if not controllers else "cgroup"
        if kind == "cgroup" and "memory" not in controllers.split(","):
            continue
        file = "memory.max" if kind == "cgroup2" else "memory.limit_in_bytes"
        for top, mounted in mounts.get(kind, ()):
            # In a container the file system may start at the cgroup of this process, or at one above it.
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
    """Return the mounts of cgroups that limit memory, by kind: the cgroup at the top, and the folder."""
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
    """Yield the variables with the memory that Slurm has given this job on this node, and its bytes."""
    counts = {
        "SLURM_MEM_PER_NODE": "1",
        "SLURM_MEM_PER_CPU": environment.get("SLURM_CPUS_ON_NODE", ""),
        "SLURM_MEM_PER_GPU": environment.get("SLURM_GPUS_ON_NODE", ""),
    }
    for name, count in counts.items():
        size = environment.get(name, "")
        if size.isdigit() and count.isdigit() and int(size) * int(count):  # 0 means all memory of the node
            yield name, (int(size) * int(count)) << 20


def _read(path: Path) -> str:
    """Return the text of a small file; "" if it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20)
    except OSError:
        return ""
