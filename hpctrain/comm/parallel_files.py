"""Whether MPI can open one file on all ranks, as parallel HDF5 needs it for checkpoints and token files."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.comm.library import MPI
from hpctrain.errors import InputOutputError

if TYPE_CHECKING:
    from hpctrain.comm.world import World

SHARED_MEMORY = Path("/dev/shm")
PAGES = 64  # of shared memory, less than which count as none: each rank takes one for an open file
WITHOUT_SHARED_MEMORY = "OMPI_MCA_sharedfp=^sm"
"""Environment variable by which Open MPI opens files without memory in SHARED_MEMORY."""


def require_parallel_files(world: World, folder: Path) -> None:
    """Open and remove a file in a folder on all ranks together; collective.

    InputOutputError, the same on all ranks, with what MPI says, where it cannot.
    """
    with world.agreement():
        if _is_full():
            raise InputOutputError(f"{folder}: MPI cannot open a file on all ranks; {_remedy('is full')}")
    name = world.everyone.broadcast_object(f".mpi-{uuid.uuid4().hex}")
    mode = MPI.MODE_CREATE | MPI.MODE_RDWR | MPI.MODE_DELETE_ON_CLOSE
    problem = ""
    try:
        MPI.File.Open(world.communicator, str(folder / name), mode).Close()
    except MPI.Exception as error:
        problem = error.Get_error_string()
        with suppress(OSError):
            (folder / name).unlink(missing_ok=True)
    with world.agreement():
        if problem:
            raise InputOutputError(
                f"{folder}: MPI_File_open cannot open a file on all ranks ({problem}){_hint()}"
            )


def _hint() -> str:
    """Tell what is known to keep Open MPI from opening files on this node; empty where nothing is."""
    if MPI.get_vendor()[0] != "Open MPI" or os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return ""
    return f"; {_remedy('cannot be written to')}"


def _is_full() -> bool:
    """Return whether Open MPI would wait forever for a page of shared memory as it opens a file."""
    if MPI.get_vendor()[0] != "Open MPI" or "OMPI_MCA_sharedfp" in os.environ:
        return False
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return False
    return status.f_blocks > 0 and status.f_bavail < PAGES


def _remedy(what: str) -> str:
    return (
        f"{SHARED_MEMORY} {what} on this node: have it mounted writable and with room, or set "
        f"{WITHOUT_SHARED_MEMORY} in the environment of all ranks"
    )
