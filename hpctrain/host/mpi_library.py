"""The module `MPI` of mpi4py, imported without starting MPI.

`World.start` starts MPI later, so that imports have no side effects.
"""

import ctypes
import os

import mpi4py

from hpctrain.errors import HpctrainError
from hpctrain.host.launcher import describe_missing_pmix, loaded_mpi_libraries

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402  (only after the settings above)

__all__ = [
    "MPI",
    "communicator_of",
    "finalize_mpi",
    "finalizes_between_nodes",
    "require_unfinalized",
    "start_mpi",
]


def require_unfinalized() -> None:
    """Check that MPI is running or can still be started: MPI cannot start twice in a process. Local.

    Raises:
        HpctrainError: MPI was finalized, by hpctrain or by the user's script.
    """
    if MPI.Is_finalized():
        raise HpctrainError(
            "MPI is already finalized in this process (World.finish()), and it cannot start again: start "
            "runs and load models before that, or in a new process"
        )


def start_mpi() -> None:
    """Start MPI with support for several threads. Collective over all ranks that the launcher has started.

    MPI must not be initialized yet (`MPI.Is_initialized()`), since MPI does not allow a second start. mpi4py
    does not finalize it: the caller does, or `World.finish`, or `finalize_at_exit`. Whether the library gives
    the thread level MPI_THREAD_MULTIPLE is not checked.

    mpi4py would hold Python's global interpreter lock until all ranks have arrived, so that no thread could
    report a missing rank. ctypes releases the lock. The error handlers are those of mpi4py.

    Raises:
        HpctrainError: srun has started ranks that this MPI cannot join.
    """
    problem = describe_missing_pmix(os.environ, MPI.get_vendor()[0], loaded_mpi_libraries())
    if problem:
        raise HpctrainError(problem)
    start = getattr(ctypes.CDLL(MPI.__file__), "MPI_Init_thread", None)
    if start is None:  # mpi4py loads MPI by itself
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        return
    start(None, None, ctypes.c_int(MPI.THREAD_MULTIPLE), ctypes.byref(ctypes.c_int()))
    for communicator in (MPI.COMM_SELF, MPI.COMM_WORLD):
        communicator.Set_errhandler(MPI.ERRORS_RETURN)


def finalize_mpi() -> None:
    """Finalize MPI, which must be running. Collective over all ranks that the launcher has started.

    MPI waits for all ranks here. As in `start_mpi`, ctypes releases Python's global interpreter lock for that
    time, so that the thread of the watchdog can report a rank that does not arrive.
    """
    finalize = getattr(ctypes.CDLL(MPI.__file__), "MPI_Finalize", None)
    if finalize is None:  # mpi4py loads MPI by itself
        MPI.Finalize()
    else:
        finalize()


def communicator_of(objects: object) -> MPI.Intracomm:
    """Return `objects` itself, typed as an MPI communicator. Local.

    Args:
        objects: `Group.objects`. That of a planned group is no MPI communicator and raises an AssertionError.
    """
    assert isinstance(objects, MPI.Intracomm), objects
    return objects


def finalizes_between_nodes() -> bool:
    """Return True if MPI_Finalize of this library returns reliably when there are several nodes.

    MPICH before 4.2 over UCX often hangs: a rank needs others to close its connections, but these already
    wait in a barrier of the launcher, where they answer nobody (pmodels/mpich#6596).
    """
    vendor, release = MPI.get_vendor()
    return vendor != "MPICH" or release >= (4, 2) or "ch4:ucx" not in MPI.Get_library_version()
