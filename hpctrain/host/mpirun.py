"""A verb that was started alone, started again on several ranks of this machine."""

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
"""For more ranks than cores, by what `mpirun --version` says."""


def restart_on_ranks(ranks: int | None, environment: Mapping[str, str] = os.environ) -> None:
    """Go on where a launcher has started so many ranks, or no number is asked for; else become `mpirun`, or
    $MPIRUN, which starts this command on so many. HpctrainError where neither can be.
    """
    started = launched_size(environment)
    if ranks is None or ranks == started:
        return
    if launcher_name(environment) != "none (one process)":
        raise HpctrainError(
            f"--ranks {ranks}: the launcher started {started}: leave --ranks out, or start {ranks}"
        )
    command = mpirun_command(environment)
    if command is None:
        raise HpctrainError(
            f"--ranks {ranks}: there is no mpirun or $MPIRUN here: start {ranks} ranks by srun"
        )
    words = [*command, "-n", str(ranks), *module_command(arguments=sys.argv[1:])]
    own = {"OMP_NUM_THREADS": "1"} | dict(environment)
    if os.geteuid() == 0:
        own |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    sys.stdout.flush()
    os.execvpe(words[0], words, own)


def mpirun_command(environment: Mapping[str, str]) -> Sequence[str] | None:
    """The words that start ranks; None where there is no such program."""
    program, *options = shlex.split(environment.get("MPIRUN", "")) or ["mpirun"]
    path = shutil.which(program, path=environment.get("PATH"))
    if path is None:
        return None
    if not options:
        asked = [path, "--version"]
        with suppress(OSError, subprocess.TimeoutExpired):  # one that says nothing has no options of ours
            said = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60).stdout
            options = [word for name, words in _OPTIONS.items() if name in said for word in words]
    return [path, *options]
