"""Command lines that start another Python interpreter, or ranks.

`python -c` and `python -m` search the current folder first, so a user's `json.py` or `random.py` would hide
the module of the standard library. The commands of this module do not search it. They import the same
hpctrain as this process, even if it is not installed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.host.launcher import launched_size, launcher_name

_ROOT = str(Path(__file__).resolve().parents[2])

_WITHOUT_CURRENT_FOLDER = "import sys; sys.path[:] = [folder for folder in sys.path if folder]; "
"""Code that must run before the first import of a file. It imports only `sys`, which is built in."""

_RUN_MODULE = "from runpy import run_module; run_module({module!r}, run_name='__main__', alter_sys=True)"

_OPEN_MPI_OPTIONS = ("--quiet", "--oversubscribe", "--bind-to", "none")
"""Options of Open MPI's mpirun for more ranks than cores."""


def code_command(code: str, arguments: Sequence[str] = ()) -> list[str]:
    """Return the words of the command that runs Python code with `arguments` as `sys.argv[1:]`.

    Nothing is started.
    """
    return [sys.executable, "-c", _WITHOUT_CURRENT_FOLDER + code, *arguments]


def module_command(module: str = "hpctrain", arguments: Sequence[str] = ()) -> list[str]:
    """Return the words of the command that runs a module as the main program. Nothing is started.

    They are this Python interpreter, "-c", a line of code, and `arguments`; more arguments may be appended.
    In contrast to `python -m`, the command does not search the current folder for modules, and it finds
    hpctrain even if that is not installed.

    Args:
        module: Name of the module.
        arguments: Arguments that the module gets as `sys.argv[1:]`.
    """
    add_root = f"sys.path += [] if {_ROOT!r} in sys.path else [{_ROOT!r}]; "
    return code_command(add_root + _RUN_MODULE.format(module=module), arguments)


def restart_on_ranks(ranks: int | None, environment: Mapping[str, str] = os.environ) -> None:
    """Replace this process by mpirun, which runs the same hpctrain command on several ranks.

    If `ranks` is None or a launcher has already started that many ranks, it does nothing; otherwise it does
    not return. The program is `mpirun`, or the command in the environment variable MPIRUN. A process without
    a launcher counts as one rank.

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
    mpirun_environment = {"OMP_NUM_THREADS": "1"} | dict(environment)
    if os.geteuid() == 0:
        mpirun_environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    sys.stdout.flush()
    os.execvpe(words[0], words, mpirun_environment)


def mpirun_command(environment: Mapping[str, str]) -> Sequence[str] | None:
    """Return the words of the command that starts ranks, after which the caller adds "-n" and their number.

    It is $MPIRUN, or without that mpirun with options for more ranks than cores; None if there is no such
    program, also if $MPIRUN names a missing one. If $MPIRUN has no options, this runs the program with
    `--version` to find out whose it is. If it does not answer within 60 s, no options are added.
    """
    program, *options = shlex.split(environment.get("MPIRUN", "")) or ["mpirun"]
    path = shutil.which(program, path=environment.get("PATH"))
    if path is None:
        return None
    if not options:
        version_command = [path, "--version"]
        with suppress(OSError, subprocess.TimeoutExpired):  # without an answer no options are added
            done = subprocess.run(version_command, capture_output=True, text=True, check=False, timeout=60)
            options = [*_OPEN_MPI_OPTIONS] if "open-mpi.org" in done.stdout else []
    return [path, *options]
