"""Checks that the launcher and MPI fit together. This module does not import mpi4py."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.host.launcher import launcher_name, launcher_variables

_MPI_LIBRARY = re.compile(r"/(libmpi|libmpich|libmpi_cray|libmpi_[a-z]+_mpich)\.so[.0-9]*$")
"""File names of MPI libraries."""

_COMPONENTS_FOR_SLURM = ("mca_pmix_s1", "mca_pmix_s2")
"""Components of Open MPI 4 that find the ranks by Slurm's own interfaces, without PMIx."""


def check_srun(environment: Mapping[str, str], vendor: str) -> None:
    """Check, before MPI starts, that it can join the ranks that srun has started.

    Args:
        environment: Environment variables of this process.
        vendor: Vendor of the MPI library, as mpi4py names it.

    Raises:
        HpctrainError: It cannot.
    """
    problem = describe_missing_pmix(environment, vendor, loaded_mpi_libraries())
    if problem:
        raise HpctrainError(problem)


def check_launcher(environment: Mapping[str, str], size: int, vendor: str) -> None:
    """Check that the launcher has started as many processes as MPI sees.

    Otherwise every process would be a world of its own.

    Args:
        environment: Environment variables of this process.
        size: Size of the world.
        vendor: Vendor of the MPI library, as mpi4py names it.

    Raises:
        HpctrainError: The numbers differ.
    """
    for name in launcher_variables(environment)[:1]:
        if int(environment[name]) != size:
            raise HpctrainError(
                f"the launcher started {environment[name]} processes ({name}), but MPI sees a world of "
                f"{size}: mpi4py is built against another MPI ({vendor}) than the launcher's; "
                "use that MPI's own mpirun, or srun with the matching --mpi"
            )


def check_contradictions(contradictions: Sequence[str]) -> None:
    """Check that the launcher's variables agree with MPI on all ranks.

    Args:
        contradictions: Results of `find_contradictions` on all ranks.

    Raises:
        HpctrainError: There is a contradiction.
    """
    if contradictions:
        raise HpctrainError(
            f"the launcher's variables contradict MPI ({contradictions[0]}): start all ranks with one "
            "launcher, and do not set or export its variables yourself"
        )


def describe_missing_pmix(environment: Mapping[str, str], vendor: str, libraries: Sequence[str]) -> str:
    """Return an error message if srun started ranks without PMIx and this MPI needs it; "" otherwise.

    Open MPI would end each rank at its start, with a page of text. Other MPIs start as worlds of one rank,
    which `check_launcher` finds.

    Args:
        environment: Environment variables of this process.
        vendor: Vendor of the MPI library, as mpi4py names it.
        libraries: Files of the MPI library.
    """
    by_srun = launcher_name(environment) == "srun (Slurm)" and "SLURM_STEPID" in environment
    if not by_srun or vendor != "Open MPI" or "PMIX_RANK" in environment or _supports_slurm(libraries):
        return ""
    count = environment["SLURM_STEP_NUM_TASKS"]
    return (
        f"srun started {count} rank{'s' * (count != '1')} without PMIx, which Open MPI needs to join them: "
        "use srun --mpi=pmix, or mpirun (srun --mpi=list shows what this Slurm supports)"
    )


def loaded_mpi_libraries() -> list[str]:
    """Return the paths of the MPI libraries that this process has loaded; [] if the system does not tell.

    More than one path means that mpi4py and another package were built with different MPI libraries.
    """
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    paths = {os.path.realpath(line[line.index("/") :]) for line in lines if "/" in line and ".so" in line}
    return sorted(path for path in paths if _MPI_LIBRARY.search(path))


def _supports_slurm(libraries: Sequence[str]) -> bool:
    """Return True if an MPI library has a component for Slurm's interfaces, or if this is unknown."""
    for library in libraries:
        folder = Path(library).parent
        if any(next(folder.glob(f"openmpi*/**/{name}.*"), None) for name in _COMPONENTS_FOR_SLURM):
            return True
        loaded = ctypes.CDLL(library)
        if any(hasattr(loaded, f"{name}_component") for name in _COMPONENTS_FOR_SLURM):
            return True
    return not libraries
