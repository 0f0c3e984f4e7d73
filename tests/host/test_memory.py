"""Memory limits, read from folders that stand for /proc and cgroups, and errors for lack of memory."""

from __future__ import annotations

import errno
import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.comm.error_messages import to_hpctrain_error
from hpctrain.host import memory as host_memory
from hpctrain.host.memory import (
    MemoryLimit,
    is_out_of_memory,
    memory_limits,
    obtainable_bytes,
)

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\n"
NODE = MemoryLimit("node", 1_024_000, "of memory")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    write(tmp_path, "proc/meminfo", MEMINFO)
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def cgroups(environment: dict[str, str] | None = None) -> dict[str, int]:
    return {limit.pool: limit.bytes for limit in memory_limits(environment or {}) if limit.pool != "node"}


def test_the_memory_of_the_node_is_a_limit(root: Path) -> None:
    assert memory_limits({}) == [NODE]
    assert host_memory.available_bytes() == 614_400
    write(root, "proc/meminfo", "")
    assert memory_limits({}) == []
    assert host_memory.available_bytes() is None


def test_cgroups_and_their_parents_are_limits(root: Path) -> None:
    write(root, "proc/self/mountinfo", "31 24 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    write(root, "proc/self/cgroup", "0::/slurm/job_7/step_0\n")
    write(root, "sys/fs/cgroup/slurm/memory.max", "max\n")
    write(root, "sys/fs/cgroup/slurm/job_7/memory.max", "8000\n")
    write(root, "sys/fs/cgroup/slurm/job_7/step_0/memory.max", "5000\n")
    assert cgroups() == {"cgroup /slurm/job_7": 8000, "cgroup /slurm/job_7/step_0": 5000}


def test_cgroups_of_version_1_are_limits(root: Path) -> None:
    write(
        root,
        "proc/self/mountinfo",
        "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
        "36 31 0:33 / /sys/fs/cgroup/devices rw,relatime - cgroup cgroup rw,devices\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n",
    )
    write(root, "proc/self/cgroup", "5:devices:/a\n4:memory:/a/b\n0::/\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    write(root, "sys/fs/cgroup/memory/a/memory.limit_in_bytes", "7000\n")
    write(root, "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    assert cgroups() == {"cgroup /a": 7000}


def test_obtainable_memory_follows_the_tightest_limit(root: Path) -> None:
    assert obtainable_bytes({}) == 614_400
    write(root, "proc/self/mountinfo", "31 24 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    write(root, "proc/self/cgroup", "0::/slurm/job_7\n")
    write(root, "sys/fs/cgroup/slurm/job_7/memory.max", "9000\n")
    assert obtainable_bytes({}) == 9000
    write(root, "sys/fs/cgroup/slurm/job_7/memory.current", "5000\n")
    assert obtainable_bytes({}) == 4000
    write(root, "sys/fs/cgroup/slurm/job_7/memory.stat", "anon 1000\ninactive_file 3000\nactive_file 1\n")
    assert obtainable_bytes({}) == 7000
    write(root, "sys/fs/cgroup/slurm/job_7/memory.current", "99000\n")
    assert obtainable_bytes({}) == 0
    write(root, "proc/meminfo", "")
    assert obtainable_bytes({}) is None


def test_in_a_container_the_file_system_may_start_at_its_own_cgroup(root: Path) -> None:
    write(root, "proc/self/mountinfo", "31 24 0:28 /docker/x /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    write(root, "proc/self/cgroup", "0::/docker/x\n")
    write(root, "sys/fs/cgroup/memory.max", "6000\n")
    assert cgroups() == {"cgroup /": 6000}
    write(root, "proc/self/mountinfo", "31 24 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    assert cgroups() == {"cgroup /": 6000}


@pytest.mark.parametrize(
    ("environment", "megabytes"),
    [
        ({"SLURM_MEM_PER_NODE": "4096"}, 4096),
        ({"SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "16"}, 8192),
        ({"SLURM_MEM_PER_GPU": "1024", "SLURM_GPUS_ON_NODE": "4"}, 4096),
        ({"SLURM_MEM_PER_NODE": "0"}, None),
        ({"SLURM_MEM_PER_CPU": "512"}, None),
    ],
)
def test_memory_allocated_by_slurm_is_a_limit(
    root: Path, environment: dict[str, str], megabytes: int | None
) -> None:
    found = list(cgroups(environment).values())
    assert found == ([] if megabytes is None else [megabytes << 20])


def test_errors_for_lack_of_memory_are_recognized() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**50)
    with pytest.raises(MemoryError) as plain:
        bytearray(2**60)
    wanted = (refused.value, plain.value, torch.OutOfMemoryError("CUDA out of memory"))
    assert all(is_out_of_memory(error) for error in (*wanted, OSError(errno.ENOMEM, "no memory")))
    others = (RuntimeError("shape mismatch"), OSError(errno.ENOSPC, "full"), ValueError("memory"))
    assert not any(is_out_of_memory(error) for error in others)


def test_lack_of_memory_is_not_reported_as_an_error_of_a_file() -> None:
    with pytest.raises(MemoryError, match="tokens"):
        to_hpctrain_error(OSError(errno.ENOMEM, "Cannot allocate memory", "tokens.h5"))


def test_shared_memory_counts_by_its_share_and_code_does_not_count(tmp_path: Path) -> None:
    size = 32 << 20
    (tmp_path / "shared").write_bytes(b"1" * size)

    def mapped(access: int) -> mmap.mmap:
        with (tmp_path / "shared").open("r+b") as file:
            memory = mmap.mmap(file.fileno(), size, access=access)
        assert memory[:: mmap.PAGESIZE].count(b"1") == size // mmap.PAGESIZE  # all of it is resident
        return memory

    def grown(before: int) -> float:
        return (host_memory.proportional_bytes() - before) / size

    before = host_memory.proportional_bytes()
    read_only = mapped(mmap.ACCESS_READ)
    assert grown(before) == pytest.approx(0, abs=0.1)
    read_only.close()
    window = mapped(mmap.ACCESS_WRITE)
    assert grown(before) == pytest.approx(1, abs=0.1)
    program = (
        "import mmap, sys; file = open(sys.argv[1], 'r+b'); memory = mmap.mmap(file.fileno(), 0); "
        "memory[::4096]; print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path / "shared"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert grown(before) == pytest.approx(0.5, abs=0.1)
        other.communicate()
    assert grown(before) == pytest.approx(1, abs=0.1)
    window.close()
    peak = host_memory.peak_proportional_bytes()
    array = np.ones(size, np.float32)
    del array
    assert host_memory.peak_proportional_bytes() > peak + 2 * size


_RELEASED = """
import torch
from hpctrain.host.device import prepare_device
from hpctrain.host.memory import release_freed_memory, resident_bytes
prepare_device(torch.device("cpu"))
tensors = [torch.ones(1 << 18) for _ in range(64)]
stays = torch.ones(1 << 10)
before = resident_bytes()
del tensors
kept = resident_bytes()
release_freed_memory()
print(before - kept, before - resident_bytes())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_freed_memory_is_released_between_blocks_that_stay() -> None:
    done = subprocess.run([sys.executable, "-c", _RELEASED], capture_output=True, text=True, check=True)
    kept, released = map(int, done.stdout.split())
    assert kept < 1 << 20 < 60 << 20 < released  # of 64 MB, below a block that stays


_FAULTS = """
import resource, torch
from hpctrain.host.device import prepare_device
prepare_device(torch.device("cpu"))
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(1 << 20) for _ in range(16)]
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(faults() for _ in range(10)))  # some rounds pass until pieces lie where they fit
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_freed_memory_is_kept_unless_the_environment_configures_malloc() -> None:
    """The child allocates 64 MB, which are 16,384 pages. Otherwise every round takes all pages again."""

    def faults(**more: str) -> int:
        own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        done = subprocess.run(
            [sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True, env=own | more
        )
        return int(done.stdout)

    assert faults() < 1000
    assert faults(MALLOC_TRIM_THRESHOLD_="1000000") > 10_000
