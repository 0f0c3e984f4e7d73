"""Collective calls of HDF5 that do not hold Python's global interpreter lock (GIL).

h5py holds the GIL while HDF5 opens or closes a file. If another rank or a file system never answers, such a
call does not return, and no thread of this process runs any more, not even the watchdog's. The functions of
this module call HDF5 through ctypes, which releases the GIL. They hold h5py's own lock during the call, since
HDF5 must not be used by two threads at once.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import h5py
from h5py._objects import phil  # h5py's global lock

from hpctrain.host.mpi_library import MPI

_DEFAULT_ERROR_STACK = 0
_WALK_UPWARD = 0


class _ErrorEntry(ctypes.Structure):
    """One entry of HDF5's error stack, as `H5E_error2_t` in `H5Epublic.h`."""

    _fields_ = (
        ("class_id", ctypes.c_int64),
        ("major", ctypes.c_int64),
        ("minor", ctypes.c_int64),
        ("line", ctypes.c_uint),
        ("function", ctypes.c_char_p),
        ("file", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
    )


_ErrorVisitor = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_ErrorEntry), ctypes.c_void_p)


def open_file(path: Path, communicator: MPI.Intracomm) -> h5py.h5f.FileID:
    """Open an existing file on all ranks of a communicator for reading and writing. Collective.

    If one rank fails, the others may wait for it without end.

    Returns:
        The open file; close it with `close_file`, which also closes all objects in it.

    Raises:
        OSError: HDF5 or MPI cannot open the file, or h5py is built without MPI.
    """
    library = _library()
    with phil:
        access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
        access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
        identifier = -1
        if library.H5Pset_fapl_mpio(access.id, communicator.handle, MPI.INFO_NULL.handle) >= 0:
            identifier = library.H5Fopen(os.fsencode(path), h5py.h5f.ACC_RDWR, access.id)
        if identifier < 0:
            raise OSError(f"Can't open file ({_errors(library)})")
        return h5py.h5f.FileID(identifier)


def close_file(file: h5py.h5f.FileID) -> None:
    """Close a file of `open_file` and all objects in it. Collective over the same communicator.

    Raises:
        OSError: HDF5 or MPI cannot close the file.
    """
    library = _library()
    with phil:
        if library.H5Fclose(file.id) < 0:
            raise OSError(f"Can't close file ({_errors(library)})")


@cache
def _library() -> ctypes.CDLL:
    """Return the HDF5 library that h5py uses.

    Raises:
        OSError: That library has no parallel files.
    """
    if not h5py.get_config().mpi:
        raise OSError("h5py is built without MPI")
    # The functions of an extension module include those of the libraries that it was linked with.
    library = ctypes.CDLL(h5py.h5f.__file__)
    is_pointer = MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_void_p)
    handle = ctypes.c_void_p if is_pointer else ctypes.c_int
    library.H5Pset_fapl_mpio.argtypes = (ctypes.c_int64, handle, handle)
    library.H5Fopen.argtypes = (ctypes.c_char_p, ctypes.c_uint, ctypes.c_int64)
    library.H5Fopen.restype = ctypes.c_int64
    library.H5Fclose.argtypes = (ctypes.c_int64,)
    library.H5Ewalk2.argtypes = (ctypes.c_int64, ctypes.c_int, _ErrorVisitor, ctypes.c_void_p)
    return library


def _errors(library: ctypes.CDLL) -> str:
    """Return the descriptions of HDF5's error stack, the cause first."""
    descriptions: list[str] = []

    def visit(_: int, entry: ctypes._Pointer[_ErrorEntry], __: int | None) -> int:
        descriptions.append((entry.contents.description or b"").decode(errors="replace"))
        return 0

    library.H5Ewalk2(_DEFAULT_ERROR_STACK, _WALK_UPWARD, _ErrorVisitor(visit), None)
    return "; ".join(descriptions)
