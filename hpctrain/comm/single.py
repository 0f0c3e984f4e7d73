"""World of one process, for notebooks and scripts that load a model without a verb."""

from __future__ import annotations

import atexit

from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.host.mpi_library import MPI, start_mpi

ENDED = "MPI was ended in this process (World.finish()): start runs and load models before that"


def single_world(device: str = "auto") -> World:
    """Return a World of this process alone, whatever other ranks there are. Local.

    MPI is started if it is not running, and is then finalized when the process ends.

    Args:
        device: Device, as in `World.start`.

    Raises:
        HpctrainError: MPI cannot be started, or was finalized.
    """
    if MPI.Is_finalized():
        raise HpctrainError(ENDED)
    if not MPI.Is_initialized():
        start_mpi()
        finalize_at_exit()
    world = World(MPI.COMM_SELF)
    world.use_device(device)
    return world


def require_running() -> None:
    """Check that groups can be used.

    Raises:
        HpctrainError: MPI was finalized.
    """
    if MPI.Is_finalized():
        raise HpctrainError(ENDED)


def finalize_at_exit() -> None:
    """Finalize MPI when this process ends. Further calls have no effect."""
    atexit.unregister(_end)
    atexit.register(_end)


def _end() -> None:
    if not MPI.Is_finalized():
        MPI.Finalize()
