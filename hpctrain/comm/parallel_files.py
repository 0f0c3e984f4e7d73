"""Files that all ranks open through MPI, as parallel HDF5 does for checkpoints and token files."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.comm.error_messages import error_reason
from hpctrain.errors import InputOutputError
from hpctrain.files import descriptor_of
from hpctrain.host.hdf5_calls import close_file, open_file
from hpctrain.host.mpi_library import MPI, communicator_of

if TYPE_CHECKING:
    from h5py.h5f import FileID

    from hpctrain.comm.group import Group
    from hpctrain.comm.world import World

SHARED_MEMORY = Path("/dev/shm")
"""Folder of the node's shared memory, in which Open MPI keeps file pointers that ranks share."""

MIN_FREE_PAGES = 64
"""Number of free pages below which SHARED_MEMORY counts as full. Each rank needs one page per open file."""

WITHOUT_SHARED_MEMORY = "OMPI_MCA_sharedfp=^sm"
"""Setting of an environment variable with which Open MPI opens files without using SHARED_MEMORY."""


def require_parallel_files(world: World, folder: Path) -> None:
    """Check that MPI can open one file on all ranks, before a run needs that. Collective over the world.

    It creates a file with a hidden, random name in `folder`, opens it on all ranks, and removes it.

    Args:
        world: The world.
        folder: Existing folder that all ranks see.

    Raises:
        InputOutputError: A rank cannot open the file, or MPI cannot. The error is raised on all ranks.
    """
    path = folder / world.everyone.broadcast_object(f".mpi-{uuid.uuid4().hex}")
    with world.agreement():
        if _is_full():
            raise InputOutputError(f"{folder}: MPI cannot open a file on all ranks; {_remedy('is full')}")
        if world.rank == 0:
            path.touch(exist_ok=False)
    try:
        # If one rank cannot open the file, MPI_File_open does not return on the other ranks.
        with world.agreement(), _naming_rank(world.rank), descriptor_of(path, os.O_RDWR):
            pass
        problem = _open_and_close(path, world)
    finally:
        if world.rank == 0:
            with suppress(OSError):
                path.unlink(missing_ok=True)
    with world.agreement():
        if problem:
            raise InputOutputError(
                f"{folder}: MPI_File_open cannot open a file on all ranks ({problem}){_hint()}"
            )


def _open_and_close(path: Path, world: World) -> str:
    """Open and close a file through MPI. Collective. Return MPI's error message; "" if there was no error."""
    try:
        with world.everyone.watched_call("open_file", path):
            MPI.File.Open(world.communicator, str(path), MPI.MODE_RDWR).Close()
    except MPI.Exception as error:
        return error.Get_error_string()
    return ""


@contextmanager
def _naming_rank(rank: int) -> Iterator[None]:
    """Turn an OSError that the block raises into an InputOutputError whose message names this rank."""
    try:
        yield
    except OSError as error:
        raise InputOutputError(
            f"{error.filename}: rank {rank} cannot open it: {error_reason(error)}"
        ) from None


@contextmanager
def open_on_all_ranks(path: Path, group: Group) -> Iterator[FileID]:
    """Return a context manager that opens an HDF5 file on all ranks through MPI, and yields its FileID.

    The file must exist, with all its datasets; it is opened for reading and writing. Opening and closing are
    collective; in the block each rank reads or writes elements of datasets by itself. An error in the block
    leaves it only on its own rank, which then waits until all ranks have left the block and closed the file.

    When HDF5 closes the file, it writes the headers again, which have not changed. If this write fails on one
    rank, such as on a full disk, the other ranks wait forever. So before the file is closed, MPI's file
    descriptors are redirected to a file in memory, which receives that write. New datasets or attributes
    would be lost.

    Args:
        path: The file, with all its datasets.
        group: Group of all ranks that open the file.

    Raises:
        InputOutputError: HDF5 or MPI cannot open or close the file.
    """
    # Open MPI names a semaphore after the file. If a killed job has left it locked, every later job that
    # opens a file of this name waits forever. It guards only shared file pointers, which HDF5 does not use.
    with suppress(OSError):
        (SHARED_MEMORY / f"sem.OMPIO_{path.name}").unlink()
    other_descriptors, problem, file = descriptors_of(path), "", None
    try:
        with group.watched_call("open_file", path):
            file = open_file(path, communicator_of(group.objects))
    except OSError as error:
        problem = error_reason(error)
    if file is None:
        # The error is raised outside of the except block. Its traceback would otherwise keep the frames of
        # `open_file`, and with them a communicator of HDF5, until after MPI has been finalized.
        raise InputOutputError(f"{path}: cannot be opened: {problem}")
    mpi_descriptors = descriptors_of(path) - other_descriptors
    try:
        yield file
    finally:
        memory = os.memfd_create("hpctrain-headers")
        for descriptor in mpi_descriptors:
            os.dup2(memory, descriptor, inheritable=False)
        os.close(memory)
        try:
            with group.watched_call("close_file", path):
                close_file(file)
        except OSError as error:
            raise InputOutputError(f"{path}: cannot be closed: {error_reason(error)}") from None


def descriptors_of(path: Path) -> set[int]:
    """Return this process's open file descriptors that refer to a file. Local.

    The set is empty if the file does not exist, is not open, or the system does not list descriptors.
    """
    descriptors = set[int]()
    with suppress(OSError):
        identity = path.stat()
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if os.path.samestat(link.stat(), identity):
                    descriptors.add(int(link.name))
    return descriptors


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
    return status.f_blocks > 0 and status.f_bavail < MIN_FREE_PAGES


def _remedy(problem: str) -> str:
    return (
        f"{SHARED_MEMORY} {problem} on this node: make it writable and free space in it, or set "
        f"{WITHOUT_SHARED_MEMORY} in the environment of all ranks"
    )
