"""Start and end of verbs, and Worlds of one process for scripts."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import NoReturn

from hpctrain.comm.error_messages import print_problems, silent_error, to_hpctrain_error
from hpctrain.comm.hangs.hang_settings import default_seconds
from hpctrain.comm.hangs.start_watch import watch_start
from hpctrain.comm.hangs.watchdog import Watchdog
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.host.launcher import launched_rank
from hpctrain.host.mpi_library import MPI, finalize_mpi, require_unfinalized, start_mpi


def run_verb(
    verb: Callable[[World], int | None], device: str | None = None, setting: str = "--device"
) -> NoReturn:
    """Start the World, run a verb in it, and leave the process. Collective over all ranks of the job.

    All ranks leave with the same exit code: that of the lowest rank that failed, otherwise 0. A watchdog ends
    a job that hangs, from the start of MPI until MPI is finalized.

    An HpctrainError that all ranks raise is printed once, by rank 0, with exit code 2 (3 for an
    InputOutputError, as which an OSError counts). If only one rank raises it and the others do not end within
    seconds, it ends them. Nothing is printed if stdout is a closed pipe. Any other exception prints its
    traceback, or one sentence if memory ran out, and ends the job with exit code 70. An interrupt ends it
    with 130. The code of a SystemExit is kept.

    Args:
        verb: Function of the World whose result is the exit code; None means 0.
        device: Device on which the ranks compute, by the rules of `World.use_device`; "cpu" also for a verb
            that only moves data; None for a verb that calls `use_device` with the device of its deck.
        setting: Option by which the user gave the device, for messages.
    """
    sys.exit(_run(verb, device, setting))


def run_verb_of_script(verb: Callable[[World], int | None], expected: Collection[int]) -> int:
    """Run a verb for a script that goes on afterwards, and return the exit code.

    Collective. MPI runs until the process ends, so that the script can load models and start other runs, also
    by calling this again; each call makes a new World. If the verb raises an error, this prints it and
    returns its exit code, as `run_verb` describes, if that is expected.

    Args:
        verb: Function of the World whose result is the exit code; None means 0.
        expected: Exit codes after which the script goes on. With any other code, MPI is finalized, and the
            process leaves as `run_verb` does.

    Raises:
        SystemExit: The exit code is not among the expected ones.
    """
    code = _run(verb, keep_mpi_after=expected)
    if MPI.Is_finalized():
        sys.exit(code)
    finalize_at_exit()
    return code


def single_world(device: str = "auto") -> World:
    """Return a World of this process alone, whatever other ranks there are. Local.

    MPI is started if it is not running, and is then finalized when the process ends. If a launcher has
    started several ranks, starting MPI waits for all of them. `watch_start` ends the job if they do not
    arrive.

    Args:
        device: Device, as in `World.start`.

    Raises:
        HpctrainError: MPI cannot be started, or was finalized, there is no such device, or the variable
            HPCTRAIN_HANG_SECONDS is not a time.
    """
    require_unfinalized()
    if not MPI.Is_initialized():
        with watch_start(default_seconds(os.environ)):
            start_mpi()
        finalize_at_exit()
    world = World(MPI.COMM_SELF)
    world.use_device(device, setting="device")
    return world


def finalize_at_exit() -> None:
    """Register MPI_Finalize for the end of this process, unless it was called before then.

    Local; returns at once. Further calls have no effect. MPI_Finalize is collective, so all ranks must end.
    """
    atexit.unregister(_end)
    atexit.register(_end)


def _end() -> None:
    if not MPI.Is_finalized():
        finalize_mpi()


def _run(
    verb: Callable[[World], int | None],
    device: str | None = None,
    setting: str = "--device",
    keep_mpi_after: Collection[int] = (),
) -> int:
    """Start the World and a watchdog, run the verb, and finish the World. Collective.

    Arguments are those of `run_verb`, and the exit codes after which MPI is not finalized.

    Returns:
        The exit code of all ranks.
    """
    with ExitStack() as stack:
        world = _connect(stack)
        code, error = 0, None
        try:
            world.set_up("auto" if device is None else "cpu")
            if device is not None and device != "cpu":
                world.use_device(device, setting=setting)
            code = verb(world) or 0
        except (HpctrainError, OSError) as raised:
            error = to_hpctrain_error(raised)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
            error = silent_error(code) if code else None
        except BaseException as unexpected:  # noqa: BLE001  (an interrupt too must end the other ranks)
            world.abort_with(unexpected)
        return world.finish(code, error, keep_mpi_after)


def _connect(stack: ExitStack) -> World:
    """Make the World of all ranks, which needs `set_up` next, and start its watchdog. Collective.

    If there can be no World, print the reason and leave the process.

    Args:
        stack: Stack of context managers whose end stops the watchdog.
    """
    try:
        seconds = default_seconds(os.environ)
    except HpctrainError as error:
        _leave_unstarted(error)
    with watch_start(seconds):
        try:
            world = World.connect()
        except HpctrainError as error:
            _leave_unstarted(error)
        world.hang.set_limit(seconds)
        stack.enter_context(Watchdog(world))
    return world


def _leave_unstarted(error: HpctrainError) -> NoReturn:
    """Leave the process because of an error for which there is no World. Only rank 0 prints the error."""
    running = MPI.Is_initialized() and not MPI.Is_finalized()
    together = running and MPI.COMM_WORLD.size > 1
    if (MPI.COMM_WORLD.rank if together else launched_rank(os.environ)) == 0:
        print_problems(error.problems)
    if running:
        finalize_mpi()
    sys.exit(error.exit_code)
