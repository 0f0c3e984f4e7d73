"""Use of the heap for the tensors of this process."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit

import torch

from hpctrain.host.c_libraries import CompilerError, build_packaged_library, open_library
from hpctrain.host.tensor_heap.tensor_heap_library import TensorHeapLibrary

_CONFIGURES_MALLOC = re.compile(
    r"MALLOC_.*=|GLIBC_TUNABLES=.*malloc|THP_MEM_ALLOC_ENABLE=1|LD_PRELOAD=.*malloc"
)
"""Environment variables by which users configure or replace malloc, or torch's use of it."""


def build_tensor_heap(environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the library of the heap, compiled for this process's torch or taken from the cache. Local.

    Args:
        environment: Environment variables.

    Raises:
        CompilerError: No compiler makes a library that runs here, or the user has configured malloc. Then
            malloc allocates the tensors.
    """
    if variable := malloc_variable(environment):
        raise CompilerError(f"${variable} is set")
    folder = Path(torch.__file__).parent
    status = (folder / "lib" / "libc10.so").stat()
    options = (
        # The first macro is not used. It changes the name in the cache with the build of torch.
        f"-DTORCH_BUILD={torch.__version__}.{status.st_mtime_ns}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        "-fvisibility=hidden",
        f"-isystem{folder}/include",
        f"-L{folder}/lib",
        *("-Xlinker", "-rpath", "-Xlinker", f"{folder}/lib"),
        "-lc10",
    )
    return build_packaged_library(
        "hpctrain.host.tensor_heap", "tensor_heap.cpp", "tensor_heap_library.py", options=options
    )


def install_tensor_heap(library: bytes) -> None:
    """Allocate the tensors of this process's CPU from a heap from now on. Local.

    Nothing happens if the process has a heap already. Existing tensors are not moved.

    The heap reserves as many addresses as the node has bytes of memory. If the addresses of the process are
    limited (`ulimit -v`), it reserves half of those that are left. It uses memory only for tensors. Tensors
    that do not fit into the heap are allocated by malloc.

    Args:
        library: Result of `build_tensor_heap` in this process or in another one of this node.

    Raises:
        OSError: The library cannot be loaded, or the system does not reserve the addresses.
    """
    loaded = _loaded_library() or TensorHeapLibrary(open_library(library, ctypes.RTLD_GLOBAL))
    page, (limit, _) = os.sysconf("SC_PAGE_SIZE"), getrlimit(RLIMIT_AS)
    size = page * os.sysconf("SC_PHYS_PAGES")
    if limit != RLIM_INFINITY:
        used = page * int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        size = min(size, max(0, limit - used) // 2)
    loaded.install(size)


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


def malloc_variable(environment: Mapping[str, str]) -> str | None:
    """Return an environment variable by which the user has configured or replaced malloc, or None."""
    found = (name for name, value in environment.items() if _CONFIGURES_MALLOC.match(f"{name}={value}"))
    return next(found, None)


@cache
def can_build_tensor_heap() -> bool:
    """Return True if `build_tensor_heap` succeeds on this machine. Local.

    Plans call it. A run knows the result for all its ranks (`World.malloc_reason`).
    """
    try:
        build_tensor_heap()
    except CompilerError:
        return False
    return True
