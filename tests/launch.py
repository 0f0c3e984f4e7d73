"""How tests start ranks and programs of their own."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def launcher(ranks: int) -> list[str]:
    """The command that starts `ranks` ranks: mpirun or $MPIRUN, with the flags of its kind for few cores."""
    program = shlex.split(os.environ.get("MPIRUN", "mpirun"))
    version = subprocess.run([*program, "--version"], capture_output=True, text=True, check=True).stdout
    flags = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in version or "open-mpi" in version else []
    return [*program, *flags, "-n", str(ranks)]


def clean_environment() -> dict[str, str]:
    """The environment without what a launcher put there, so that a child may start as a world of its own."""
    marks = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "HYDI_", "MPIR_", "MPI_LOCAL", "SLURM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(marks)}
    return kept | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
