"""How tests start ranks and programs of their own."""

from __future__ import annotations

import os
import shlex
import subprocess
from functools import cache

from tests.selection import ROOT
from tests.selection import VARIABLES as SELECTION_VARIABLES


def launcher(ranks: int) -> list[str]:
    """The command that starts `ranks` ranks: mpirun or $MPIRUN, with the flags of its kind for few cores."""
    program = os.environ.get("MPIRUN", "mpirun")
    return [*shlex.split(program), *_flags(program), "-n", str(ranks)]


def is_open_mpi() -> bool:
    """Whether that is Open MPI's, whose ranks need nothing of it but their environment."""
    return bool(_flags(os.environ.get("MPIRUN", "mpirun")))


@cache
def _flags(program: str) -> tuple[str, ...]:
    """What lets a launcher start more ranks than there are cores."""
    command = [*shlex.split(program), "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ours = "Open MPI" in version or "open-mpi" in version
    return ("--oversubscribe", "--bind-to", "none") if ours else ()


def clean_environment() -> dict[str, str]:
    """The environment without what a launcher put there, so that a child may start as a world of its own."""
    marks = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "HYDI_", "MPIR_", "MPI_LOCAL", "SLURM_")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(marks) and name not in SELECTION_VARIABLES
    }
    return kept | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",  # other tests run beside these ranks
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
