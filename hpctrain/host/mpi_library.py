"""mpi4py, loaded without starting MPI: `World.start` does that, so that imports stay free of effects."""

import ctypes

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402  (only after the settings above)

__all__ = ["MPI", "communicator_of", "finalizes_between_nodes", "start_mpi"]


def start_mpi() -> None:
    """Start MPI for use by several threads. Collective over all ranks that the launcher has started.

    mpi4py would hold Python's global interpreter lock until all ranks have come, so that no thread could
    report a rank that does not come. ctypes releases the lock. The error handlers are those of mpi4py.
    """
    start = getattr(ctypes.CDLL(MPI.__file__), "MPI_Init_thread", None)
    if start is None:  # mpi4py loads MPI by itself
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        return
    start(None, None, ctypes.c_int(MPI.THREAD_MULTIPLE), ctypes.byref(ctypes.c_int()))
    for communicator in (MPI.COMM_SELF, MPI.COMM_WORLD):
        communicator.Set_errhandler(MPI.ERRORS_RETURN)


def communicator_of(objects: object) -> MPI.Intracomm:
    """What the small values of a Group travel over, where it is MPI's, as h5py and a duplicate need it."""
    assert isinstance(objects, MPI.Intracomm), objects
    return objects


def finalizes_between_nodes() -> bool:
    """Whether this MPI's Finalize can be relied on to return where there are several nodes.

    MPICH before 4.2 over UCX often does not: a rank closes its connections, for which it needs ranks that
    wait in a barrier of the launcher already, where they answer nobody (pmodels/mpich#6596).
    """
    vendor, release = MPI.get_vendor()
    return vendor != "MPICH" or release >= (4, 2) or "ch4:ucx" not in MPI.Get_library_version()
