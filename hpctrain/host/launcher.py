"""Environment variables by which mpirun or srun tell a process its rank, and checks that MPI agrees.

This module does not import mpi4py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.text import counted

LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", ""),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", ""),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES"),
)
"""Environment variables of each launcher: number of processes, rank, local rank, and nodes ("" if none).

Launchers may be nested: in a Slurm job, mpirun uses srun to start its daemons, and these start the ranks. So
variables of both may be set. Those of the inner launcher, which has started the ranks, come first.
"""

_PREFIXES = (
    *("OMPI_", "PMIX_", "PMI_", "PRTE_", "PALS_", "HYDRA_", "HYDI_", "MPI_LOCAL", "MPIR_"),
    *("SLURM_STEP", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_TASK_PID"),
)
"""Prefixes of the variables that tell a process which rank it is."""

_MPI_LIBRARY = re.compile(r"/(libmpi|libmpich|libmpi_cray|libmpi_[a-z]+_mpich)\.so[.0-9]*$")
"""File names of MPI libraries."""

_COMPONENTS_FOR_SLURM = ("mca_pmix_s1", "mca_pmix_s2")
"""Components of Open MPI 4 that find the ranks by Slurm's own interfaces, without PMIx."""


def launcher_name(environment: Mapping[str, str]) -> str:
    """Return the name of the launcher for messages, such as "srun (Slurm)" or "none (one process)"."""
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return "mpirun of Open MPI"
    if "PALS_APID" in environment:
        return "PALS (Cray mpiexec)"
    # Slurm gives batch scripts and interactive shells step ids from 4294967290; no srun has started them.
    is_shell = environment.get("SLURM_STEP_ID", "").startswith("429496")
    if "SLURM_STEP_NUM_TASKS" in environment and not is_shell:
        return "srun (Slurm)"
    if "PMI_SIZE" in environment or "PMI_RANK" in environment:
        return "mpiexec (Hydra, of MPICH or Intel MPI)"
    if "PMIX_RANK" in environment:
        return "a PMIx launcher"
    return "none (one process)"


def launcher_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the inner launcher's variables: size, rank, local rank and number of nodes.

    The names are a row of LAUNCHERS, in which "" stands for a variable that does not exist; () without a
    launcher.
    """
    return next((names for names in LAUNCHERS if environment.get(names[0], "").isdigit()), ())


def launched_size(environment: Mapping[str, str]) -> int:
    """Return the number of processes that the launcher has started in this job; 1 without a launcher."""
    return next((int(environment[name]) for name in launcher_variables(environment)[:1]), 1)


def launched_rank(environment: Mapping[str, str]) -> int:
    """Return the rank of this process in the job according to the launcher; 0 without a launcher. Local."""
    values = (environment.get(name, "") for _, name, *_ in LAUNCHERS)
    return next((int(value) for value in values if value.isdigit()), 0)


def environment_without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of the environment for a process that a rank starts and that must not take part in MPI.

    It has no variables by which launchers and MPI libraries tell a process its rank, and has a variable with
    which importing mpi4py does not start MPI.

    Args:
        environment: Environment of this process, which does not change.
    """
    variables = {name: value for name, value in environment.items() if not name.startswith(_PREFIXES)}
    return {**variables, "MPI4PY_RC_INITIALIZE": "0"}


def check_launched_size(environment: Mapping[str, str], size: int, vendor: str) -> None:
    """Check that the launcher has started as many processes as MPI sees. Local.

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


def find_contradictions(environment: Mapping[str, str], rank: int, local_rank: int, nodes: int) -> list[str]:
    """Return statements of the launcher's variables that contradict MPI; [] if there are none. Local.

    Only the variables of the inner launcher are compared, since they describe this process. An example is
    "SLURM_PROCID = 3, but MPI's rank is 1".

    Args:
        environment: Environment variables of this process.
        rank: Rank according to MPI.
        local_rank: Number of the rank on its node according to MPI.
        nodes: Number of nodes according to MPI.
    """
    of_mpi = (("rank", rank), ("rank on the node", local_rank), ("number of nodes", nodes))
    return [
        f"{name} = {environment[name]}, but MPI's {what} is {value}"
        for name, (what, value) in zip(launcher_variables(environment)[1:], of_mpi, strict=False)
        if environment.get(name, "").isdigit() and int(environment[name]) != value
    ]


def describe_missing_pmix(environment: Mapping[str, str], vendor: str, libraries: Sequence[str]) -> str:
    """Return an error message if srun started ranks without PMIx and this MPI needs it; "" otherwise. Local.

    It is called before MPI starts. Open MPI would end each rank at its start, with a page of text. Other MPIs
    start as worlds of one rank, which `check_launched_size` finds.

    Args:
        environment: Environment variables of this process.
        vendor: Vendor of the MPI library, as mpi4py names it.
        libraries: Paths of the MPI library. They are loaded to look for support of Slurm; if there are none,
            the support is assumed.
    """
    by_srun = launcher_name(environment) == "srun (Slurm)" and "SLURM_STEPID" in environment
    if not by_srun or vendor != "Open MPI" or "PMIX_RANK" in environment or _supports_slurm(libraries):
        return ""
    count = environment["SLURM_STEP_NUM_TASKS"]
    return (
        f"srun started {count} rank{'s' * (count != '1')} without PMIx, which Open MPI needs to join them: "
        "use srun --mpi=pmix, or mpirun (srun --mpi=list shows what this Slurm supports)"
    )


def find_unsafe_start(environment: Mapping[str, str], nodes: int) -> str:
    """Return a statement if ranks of several nodes may crash when MPI starts, because of Slurm; "" otherwise.

    Local. MPI_Init ends with a fence of PMIx without data, which has to be a barrier. By default, Slurm sends
    it along a tree of nodes. With fewer nodes than TreeWidth (50 or 16) each node is a tree by itself,
    so a rank of one node can send before ranks of another can receive. Open MPI then calls a null pointer.

    Args:
        environment: Environment variables of this process.
        nodes: Number of nodes of the job.
    """
    by_pmix = launcher_name(environment) == "srun (Slurm)" and "PMIX_RANK" in environment
    if not by_pmix or nodes < 2 or environment.get("SLURM_PMIX_FENCE", "").lower() == "ring":
        return ""
    return "Slurm's default fence of PMIx may be no barrier: ranks sometimes crash in MPI_Init"


def _supports_slurm(libraries: Sequence[str]) -> bool:
    """Return True if an MPI library has a component for Slurm's interfaces, or if this is unknown."""
    import ctypes

    for library in libraries:
        folder = Path(library).parent
        if any(next(folder.glob(f"openmpi*/**/{name}.*"), None) for name in _COMPONENTS_FOR_SLURM):
            return True
        loaded = ctypes.CDLL(library)
        if any(hasattr(loaded, f"{name}_component") for name in _COMPONENTS_FOR_SLURM):
            return True
    return not libraries


def loaded_mpi_libraries() -> list[str]:
    """Return the paths of the MPI libraries that this process has loaded; [] if they are unknown.

    More than one path means that mpi4py and another package were built with different MPI libraries.
    """
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    paths = {os.path.realpath(line[line.index("/") :]) for line in lines if "/" in line and ".so" in line}
    return sorted(path for path in paths if _MPI_LIBRARY.search(path))


def core_warning(threads: int, ranks: Sequence[tuple[object, Sequence[int]]]) -> str:
    """Return a warning if ranks have fewer cores than threads; "" otherwise. Local; nothing is printed.

    One sentence names the first rank that may use fewer cores than it has threads, or the numbers of a node
    whose ranks have more threads than cores in all. A single thread per rank gives "".

    Args:
        threads: Number of threads with which each rank computes.
        ranks: Node of each rank, and the cores that the rank may use; () if the cores are unknown.
    """
    if threads == 1:
        return ""
    for rank, (node, rank_cores) in enumerate(ranks):
        cores_on_node = [cores for other, cores in ranks if other == node]
        cores, threads_of_node = len(set().union(*cores_on_node)), len(cores_on_node) * threads
        if 0 < len(rank_cores) < threads:
            return (
                f"run.threads = {threads}, but rank {rank} may use only {counted(len(rank_cores), 'core')}: "
                f"use mpirun --map-by slot:PE={threads} or --bind-to none, srun --cpus-per-task={threads}, "
                "or fewer threads"
            )
        if 0 < cores < threads_of_node:
            return (
                f"run.threads = {threads}: the ranks of a node have {threads_of_node} threads but "
                f"{counted(cores, 'core')}; start fewer ranks per node, or use fewer threads"
            )
    return ""
