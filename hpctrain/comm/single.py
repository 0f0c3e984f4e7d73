"""A world of one process, for notebooks and scripts that look at a model: no verb begins or ends it."""

from __future__ import annotations

import atexit

from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.host.mpi_library import MPI, start_mpi

ENDED = "MPI was ended in this process (World.finish()): start runs and load models before that"


def single_world(device: str = "auto") -> World:
    """This process alone, whatever others there are; MPI is started where nobody has, and ends with it.

    `device` as in `World.start`. HpctrainError where MPI cannot be started, or was ended already.
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
    """HpctrainError where MPI was ended, and groups are of no use any more."""
    if MPI.Is_finalized():
        raise HpctrainError(ENDED)


def finalize_at_exit() -> None:
    """Have MPI finalized when this process ends, once, whoever asks for it."""
    atexit.unregister(_end)
    atexit.register(_end)


def _end() -> None:
    if not MPI.Is_finalized():
        MPI.Finalize()
