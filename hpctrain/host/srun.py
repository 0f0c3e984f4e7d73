"""Ranks that srun started without what their MPI needs to find one another."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.host.launcher import launcher_name

# File names of the libraries that make an MPI, as the dynamic linker knows them.
MPI_LIBRARY = re.compile(r"/(libmpi|libmpich|libmpi_cray|libmpi_[a-z]+_mpich)\.so[.0-9]*$")
# Parts of Open MPI 4 that find the ranks by Slurm's own interfaces, without PMIx.
WITHOUT_PMIX = ("mca_pmix_s1", "mca_pmix_s2")


def describe_missing_pmix(environment: Mapping[str, str], vendor: str, libraries: Sequence[str]) -> str:
    """What is wrong where srun gave its ranks no PMIx and this MPI knows no other way; "" where nothing is.

    Open MPI would end each rank on starting, with a page of text. Other MPIs start as worlds of one rank,
    which `check_launcher` sees. `vendor`: of the MPI; `libraries`: the files that it was loaded from.
    """
    started = launcher_name(environment) == "srun (Slurm)" and "SLURM_STEPID" in environment
    if not started or vendor != "Open MPI" or "PMIX_RANK" in environment or _knows_slurm(libraries):
        return ""
    count = environment["SLURM_STEP_NUM_TASKS"]
    return (
        f"srun started {count} rank{'s' * (count != '1')} without PMIx, which Open MPI needs to join them: "
        "use srun --mpi=pmix, or mpirun (srun --mpi=list tells what this Slurm has)"
    )


def loaded_mpi_libraries() -> list[str]:
    """The different MPI libraries in this process's memory, on Linux."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    paths = {os.path.realpath(line[line.index("/") :]) for line in lines if "/" in line and ".so" in line}
    return sorted(path for path in paths if MPI_LIBRARY.search(path))


def _knows_slurm(libraries: Sequence[str]) -> bool:
    """Whether one of them has such a part, beside it or inside; true where that cannot be told."""
    for library in libraries:
        folder = Path(library).parent
        if any(next(folder.glob(f"openmpi*/**/{part}.*"), None) for part in WITHOUT_PMIX):
            return True
        inside = ctypes.CDLL(library)
        if any(hasattr(inside, f"{part}_component") for part in WITHOUT_PMIX):
            return True
    return not libraries
