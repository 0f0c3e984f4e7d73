"""Use of the heap for the tensors of this process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit

import torch

from hpctrain.host.c_libraries import CompilerError, build_packaged_library, open_library
from hpctrain.host.tensor_heap.tensor_heap_library import TensorHeapLibrary


def build_tensor_heap(environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the library of the heap for this process's torch, from the cache if it is there. Local.

    Args:
        environment: Environment variables, which may configure malloc.

    Raises:
        CompilerError: The user has configured malloc by environment variables, which the heap would replace,
            or no compiler makes a library that runs here.
    """
    if configures_malloc(environment):
        raise CompilerError("malloc is configured by environment variables")
    folder = Path(torch.__file__).parent
    options = (
        f"-DTORCH_RELEASE={torch.__version__}",  # nothing reads it: a library serves one release of torch
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-isystem{folder}/include",
        f"-L{folder}/lib",
        f"-Wl,-rpath,{folder}/lib",
        "-lc10",
    )
    return build_packaged_library(
        "hpctrain.host.tensor_heap", "tensor_heap.cpp", "tensor_heap_library.py", options=options
    )


def install_tensor_heap(content: bytes) -> None:
    """Allocate the tensors of this process's CPU from a heap from now on. Local.

    Nothing happens if it has one already. Tensors that exist stay where they are. The heap takes as many
    addresses as the node has memory, and at most half of those that the process may use. It takes memory only
    for tensors. Tensors that do not fit are allocated by malloc.

    Args:
        content: Library that `build_tensor_heap` has returned to a process of this node.

    Raises:
        OSError: The library cannot be loaded, or the system does not reserve so many addresses.
    """
    library = _loaded_library() or TensorHeapLibrary(open_library(content, ctypes.RTLD_GLOBAL))
    size, (addresses, _) = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), getrlimit(RLIMIT_AS)
    library.install(size if addresses == RLIM_INFINITY else min(size, addresses // 2))


def release_tensor_heap() -> None:
    """Return the free memory of this process's heap to the system, if it has a heap. Local."""
    library = _loaded_library()
    if library is not None:
        library.release()


def _loaded_library() -> TensorHeapLibrary | None:
    """Return the library that this process has loaded; None if it has loaded none."""
    with suppress(AttributeError):
        return TensorHeapLibrary(ctypes.CDLL(None))
    return None


def configures_malloc(environment: Mapping[str, str]) -> bool:
    """Return True if environment variables configure the malloc of glibc or another one, such as jemalloc."""
    variables = any(name.startswith("MALLOC_") for name in environment)
    return variables or "malloc" in environment.get("GLIBC_TUNABLES", "")


@cache
def can_build_tensor_heap() -> bool:
    """Return True if `build_tensor_heap` succeeds on this machine. Local."""
    try:
        build_tensor_heap()
    except CompilerError:
        return False
    return True
