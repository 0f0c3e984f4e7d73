"""mpi4py, loaded without starting MPI: `World.start` does that, so that imports stay free of effects."""

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402  (only after the settings above)

__all__ = ["MPI", "communicator_of", "finalizes_between_nodes"]


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
