"""How every verb that uses ranks starts and ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from hpctrain.comm.launcher import started_rank
from hpctrain.comm.library import MPI
from hpctrain.comm.outcome import as_error, print_problems
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError


def run_verb(verb: Callable[[World], int | None], device: str = "auto") -> NoReturn:
    """Start the World, run a verb on it, and leave with one exit code on all ranks.

    The verb's return value is the exit code, None being 0. An HpctrainError that all ranks raise is
    printed once, from rank 0; one that a single rank raises ends the others within seconds. An OSError is an
    error of input or output, as in `agreement`; of a reader of stdout who has seen enough, nothing is said.
    Any other exception prints its traceback and ends the job with exit code 70.
    """
    try:
        world = World.start(device)
    except HpctrainError as error:
        leave_unstarted(error)
    problems: tuple[str, ...] = ()
    agreed = True
    try:
        code = verb(world) or 0
    except (HpctrainError, OSError) as raised:
        reported = as_error(raised)
        code, problems, agreed = reported.exit_code, reported.problems, world.is_agreed(reported)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        agreed = code == 0
    except BaseException as error:  # noqa: BLE001  (an interrupt too must end the other ranks)
        world.fail(error)
    sys.exit(world.finish(code, problems, agreed))


def leave_unstarted(error: HpctrainError) -> NoReturn:
    """Leave with an error that came before there was a World: one rank prints it."""
    together = MPI.Is_initialized() and MPI.COMM_WORLD.size > 1
    if (MPI.COMM_WORLD.rank if together else started_rank(os.environ)) == 0:
        print_problems(error.problems)
    if MPI.Is_initialized():
        MPI.Finalize()
    sys.exit(error.exit_code)
