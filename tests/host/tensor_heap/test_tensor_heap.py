"""Heap of tensors: contents, reuse, what it returns to the system, and where malloc is used instead.

Tests of tensor_heap.py beside tensor_heap_library.py.
"""

from __future__ import annotations

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
    install_tensor_heap,
    malloc_variable,
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
    own = {name: value for name, value in os.environ.items() if malloc_variable({name: value}) is None}
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
    """The heap has half of what is left of 6 GB. malloc has no memory for a larger tensor either."""
    refused, allocated, large = run_program("""
def limit_addresses(size):
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit_addresses(used)
try:
    install_tensor_heap(library)
except OSError:
    print(1)
limit_addresses(6 << 30)
install_tensor_heap(library)
print(int(tensor(64).sum().item()))
try:
    torch.empty(5 << 30, dtype=torch.uint8)
except RuntimeError as error:
    print(int(is_out_of_memory(error)))
""")
    assert (refused, allocated, large) == (1, 64 * (MEGABYTE // 4), 1)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MALLOC_ARENA_MAX", "8"),
        ("MALLOC_CONF", "narenas:1"),
        ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0"),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so.2"),
        ("THP_MEM_ALLOC_ENABLE", "1"),
    ],
)
def test_malloc_stays_if_the_user_has_configured_it(variable: str, value: str) -> None:
    assert malloc_variable({"GLIBC_TUNABLES": "glibc.rtld.nns=4", "LD_PRELOAD": "libdarshan.so"}) is None
    with pytest.raises(CompilerError, match=rf"\${variable} is set"):
        build_tensor_heap({"PATH": "/bin", variable: value})


def test_sizes_that_torch_refuses_are_refused() -> None:
    """Sizes close to 2^64 would become 0 if they were rounded up."""
    install_tensor_heap(build_tensor_heap())
    tensor = torch.ones(1 << 16)
    with pytest.raises(RuntimeError):
        torch.empty(0).untyped_storage().resize_(-1)
    assert tensor.eq(1).all()


def test_a_forked_process_can_allocate() -> None:
    """Other threads allocate while the process forks. The child would hang if it inherited a locked heap."""
    statuses = run_program("""
import os, threading
install_tensor_heap(library)
end = threading.Event()
def allocate():
    while not end.is_set():
        torch.empty(1 << 16)
threads = [threading.Thread(target=allocate) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(100):
    child = os.fork()
    if not child:
        torch.empty(1 << 16)
        os._exit(0)
    print(os.waitpid(child, 0)[1])
end.set()
""")
    assert statuses == [0] * 100


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
    where = f"(rank 0 on {world.hostname})"
    assert other.malloc_reason == f"no C++ compiler: c++, g++, clang++ not found {where}"
    other.use_device("cpu")  # which sets nothing up again
    assert other.malloc_reason
    monkeypatch.setattr(tensor_heap, "build_packaged_library", fail)
    tensor_heap.can_build_tensor_heap.cache_clear()
    assert not can_build_tensor_heap()
    tensor_heap.can_build_tensor_heap.cache_clear()
