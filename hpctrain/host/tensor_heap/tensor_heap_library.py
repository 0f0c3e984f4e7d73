"""Library that is compiled from `tensor_heap.cpp`, as ctypes calls it.

As a program, this module tries the library that is its argument, in a process that a wrong library may end.
It imports only the standard library, so that it starts quickly.
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIED_BYTES = 1 << 30
"""Size of the heap of a trial."""


class TensorHeapLibrary:
    """Functions of the library.

    Attributes:
        release: Function that returns the free memory of the heap to the system.
        allocate: Function that allocates memory as torch does for a tensor of so many bytes, and returns its
            address.
        free: Function that frees such memory.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Look up the functions.

        Raises:
            AttributeError: The library does not have them.
        """
        self._install = library.hpctrain_install_tensor_heap
        self._install.argtypes = (ctypes.c_size_t,)
        self.release = library.hpctrain_release_tensor_heap
        self.allocate, self.free = library.hpctrain_allocate_tensor, library.hpctrain_free_tensor
        self.allocate.argtypes, self.allocate.restype = (ctypes.c_size_t,), ctypes.c_void_p
        self.free.argtypes = (ctypes.c_void_p,)

    def install(self, size: int) -> None:
        """Allocate the tensors of this process from a heap of at most this many bytes, from now on.

        Raises:
            OSError: The system does not reserve so many addresses.
        """
        error = self._install(size)
        if error:
            raise OSError(error, os.strerror(error))


def try_library(library: TensorHeapLibrary) -> None:
    """Install a heap and call every function once.

    Raises:
        AssertionError: The memory of freed tensors is not joined.
    """
    library.install(_TRIED_BYTES)
    first, second, third = (library.allocate(1 << 20) for _ in range(3))
    for address in (first, second, third):
        ctypes.memset(address, 1, 1 << 20)
    library.free(second)
    library.free(first)
    joined = library.allocate(2 << 20)
    assert joined == first, "the memory of two freed tensors is not joined"
    library.free(third)
    library.release()


if __name__ == "__main__":
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try_library(TensorHeapLibrary(ctypes.CDLL(sys.argv[1])))
