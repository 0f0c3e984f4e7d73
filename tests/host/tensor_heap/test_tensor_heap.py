"""Heap of tensors: contents, reuse, what it returns to the system, and where malloc is used instead.

Tests of tensor_heap.py beside tensor_heap_library.py.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from hpctrain.comm import world as world_module
from hpctrain.comm.world import World
from hpctrain.host.c_libraries import CompilerError
from hpctrain.host.tensor_heap import tensor_heap
from hpctrain.host.tensor_heap.tensor_heap import (
    build_tensor_heap,
    can_build_tensor_heap,
    configures_malloc,
    install_tensor_heap,
)

pytestmark = pytest.mark.skipif(not can_build_tensor_heap(), reason="no C++ compiler")

MEGABYTE = 1 << 20

_INSTALL = """
import resource, sys
import torch
from hpctrain.host.memory import is_out_of_memory, release_freed_memory, resident_bytes
from hpctrain.host.tensor_heap.tensor_heap import build_tensor_heap, install_tensor_heap
library = build_tensor_heap()
def tensor(megabytes):
    return torch.ones(megabytes << 18)
"""


def run_program(program: str) -> list[int]:
    """Run a program after `_INSTALL` in another process, and return the numbers that it prints."""
    own = {name: value for name, value in os.environ.items() if not configures_malloc({name: value})}
    command = [sys.executable, "-c", _INSTALL + program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=own)
    return [int(word) for word in done.stdout.split()]


def test_tensors_do_not_overlap() -> None:
    """Four threads allocate, fill, check and free tensors of 16 KB to 2 MB."""
    install_tensor_heap(build_tensor_heap())

    def use(thread: int) -> None:
        rng, tensors = random.Random(thread), list[tuple[int, Tensor]]()
        for number in range(500):
            size = rng.randrange(1 << 14, 1 << 21) // 8
            tensors.append((number, torch.full((size,), 1000 * thread + number)))
            assert tensors[-1][1].data_ptr() % 64 == 0
            while len(tensors) > rng.randrange(1, 20):
                filled, values = tensors.pop(rng.randrange(len(tensors)))
                assert values.eq(1000 * thread + filled).all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))


def test_freed_memory_is_joined_and_used_again_without_new_pages() -> None:
    """Small objects between tensors of 3 MB do not keep a tensor of 96 MB from their memory."""
    (faults,) = run_program("""
install_tensor_heap(library)
pairs = [(tensor(3), bytearray(100)) for _ in range(32)]
between = [each for _, each in pairs]
del pairs
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
tensor(96)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
""")
    assert faults < 1000  # of 24,576 pages


def test_the_best_place_is_used() -> None:
    """A tensor of 2 MB is placed in the hole of 2 MB, although one of 8 MB comes first."""
    (fits,) = run_program("""
install_tensor_heap(library)
tensors = [tensor(size) for size in (8, 1, 2, 1)]
address = tensors[2].data_ptr()
tensors[0] = tensors[2] = None
print(int(tensor(2).data_ptr() == address))
""")
    assert fits


def test_free_memory_is_released_and_counts_again_when_it_is_used() -> None:
    kept, released, used = run_program("""
install_tensor_heap(library)
tensors = [tensor(4) for _ in range(16)]
before = resident_bytes()
del tensors[:15]
print(before - resident_bytes())
release_freed_memory()
print(before - resident_bytes())
again = tensor(60)
print(before - resident_bytes())
assert again.eq(1).all() and tensors[0].eq(1).all()
""")
    assert abs(kept) < MEGABYTE
    assert released > 59 * MEGABYTE
    assert abs(used) < 2 * MEGABYTE


def test_limited_addresses_are_not_exceeded() -> None:
    """The heap has half of 6 GB. A larger tensor is allocated by malloc, which has no memory for it."""
    refused, allocated, large = run_program("""
def limit_addresses(size):
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit_addresses(used + (32 << 20))
try:
    install_tensor_heap(library)
except OSError as error:
    print(error.errno)
limit_addresses(6 << 30)
install_tensor_heap(library)
print(int(tensor(64).sum().item()))
try:
    torch.empty(5 << 30, dtype=torch.uint8)
except RuntimeError as error:
    print(int(is_out_of_memory(error)))
""")
    assert (refused, allocated, large) == (errno.ENOMEM, 64 * (MEGABYTE // 4), 1)


@pytest.mark.parametrize("variable", ["MALLOC_ARENA_MAX", "MALLOC_CONF", "GLIBC_TUNABLES"])
def test_malloc_stays_if_the_user_has_configured_it(variable: str) -> None:
    assert not configures_malloc({"GLIBC_TUNABLES": "glibc.rtld.nns=4", "PATH": "/bin"})
    with pytest.raises(CompilerError, match="malloc is configured by environment variables"):
        build_tensor_heap({variable: "glibc.malloc.tcache_count=0"})


@pytest.mark.mpi(min_size=1, max_size=2)
def test_ranks_without_a_library_use_malloc_and_say_why(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> bytes:
        raise CompilerError("no C++ compiler: c++, g++, clang++ not found")

    assert world.malloc_reason == ""
    monkeypatch.setattr(world_module, "build_tensor_heap", fail)
    other = world.subworld(range(world.size))
    other.use_device("cpu")
    assert other.malloc_reason == "no C++ compiler: c++, g++, clang++ not found"
    other.use_device("cpu")  # which sets nothing up again
    monkeypatch.setattr(tensor_heap, "build_packaged_library", fail)
    tensor_heap.can_build_tensor_heap.cache_clear()
    assert not can_build_tensor_heap()
    tensor_heap.can_build_tensor_heap.cache_clear()
