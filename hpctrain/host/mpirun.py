"""Restart of a command on several ranks of this machine by mpirun."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hpctrain.errors import HpctrainError
from hpctrain.host.launcher import launched_size, launcher_name
from hpctrain.host.python_command import module_command

_OPTIONS = {"open-mpi.org": ("--quiet", "--oversubscribe", "--bind-to", "none")}
"""Options for more ranks than cores, by a part of the output of `mpirun --version`."""


def restart_on_ranks(ranks: int | None, environment: Mapping[str, str] = os.environ) -> None:
    """Replace this process by mpirun, which runs the same hpctrain command on several ranks.

    If `ranks` is None or a launcher has already started that many ranks, do nothing. The program is `mpirun`,
    or the command in the environment variable MPIRUN.

    Args:
        ranks: Number of ranks; None if any number will do.
        environment: Environment variables of this process.

    Raises:
        HpctrainError: A launcher has started another number of ranks, or there is no mpirun.
    """
    started = launched_size(environment)
    if ranks is None or ranks == started:
        return
    if launcher_name(environment) != "none (one process)":
        raise HpctrainError(
            f"--ranks {ranks}: the launcher started {started} ranks: leave --ranks out, or start {ranks}"
        )
    command = mpirun_command(environment)
    if command is None:
        raise HpctrainError(
            f"--ranks {ranks}: there is neither mpirun nor $MPIRUN here: start {ranks} ranks with srun"
        )
    words = [*command, "-n", str(ranks), *module_command(arguments=sys.argv[1:])]
    own = {"OMP_NUM_THREADS": "1"} | dict(environment)
    if os.geteuid() == 0:
        own |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    sys.stdout.flush()
    os.execvpe(words[0], words, own)


def mpirun_command(environment: Mapping[str, str]) -> Sequence[str] | None:
    """Return the words of the command that starts ranks, up to the number of ranks.

    None if there is no such program.
    """
    program, *options = shlex.split(environment.get("MPIRUN", "")) or ["mpirun"]
    path = shutil.which(program, path=environment.get("PATH"))
    if path is None:
        return None
    if not options:
        version_command = [path, "--version"]
        with suppress(OSError, subprocess.TimeoutExpired):  # without an answer no options are added
            done = subprocess.run(version_command, capture_output=True, text=True, check=False, timeout=60)
            options = [word for name, words in _OPTIONS.items() if name in done.stdout for word in words]
    return [path, *options]
