"""mpi4py, loaded without starting MPI: `World.start` does that, so that imports stay free of effects."""

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402  (only after the settings above)

__all__ = ["MPI"]
