"""Check that MPI can open a file on all ranks, as parallel HDF5 does for checkpoints and token files."""

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
PAGES = 64
"""Pages of shared memory below which it counts as full. Each rank needs one page for an open file."""

WITHOUT_SHARED_MEMORY = "OMPI_MCA_sharedfp=^sm"
"""Setting of an environment variable with which Open MPI opens files without using SHARED_MEMORY."""


def require_parallel_files(world: World, folder: Path) -> None:
    """Check that MPI can open one file on all ranks by creating and removing a file in `folder`. Collective.

    Raises:
        InputOutputError: MPI cannot open it; the error is raised on all ranks, with MPI's message.
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
    """Return the known reason why Open MPI cannot open files on this node; "" if none is known."""
    if MPI.get_vendor()[0] != "Open MPI" or os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return ""
    return f"; {_remedy('cannot be written to')}"


def _is_full() -> bool:
    """Return True if Open MPI would wait forever for a page of shared memory when it opens a file."""
    if MPI.get_vendor()[0] != "Open MPI" or "OMPI_MCA_sharedfp" in os.environ:
        return False
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return False
    return status.f_blocks > 0 and status.f_bavail < PAGES


def _remedy(problem: str) -> str:
    return (
        f"{SHARED_MEMORY} {problem} on this node: mount it writable and with free space, or set "
        f"{WITHOUT_SHARED_MEMORY} in the environment of all ranks"
    )
