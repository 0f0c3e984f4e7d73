"""Information about this process from the environment variables of its launcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def environment_without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that a rank starts and that must not take part in MPI.

    It has no variables of launchers, and a variable with which importing mpi4py does not start MPI.
    """
    kept = {name: value for name, value in environment.items() if not name.startswith(_PREFIXES)}
    return {**kept, "MPI4PY_RC_INITIALIZE": "0"}


def launcher_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the inner launcher's variables, as in LAUNCHERS; () without a launcher."""
    return next((names for names in LAUNCHERS if environment.get(names[0], "").isdigit()), ())


def find_contradictions(environment: Mapping[str, str], rank: int, local_rank: int, nodes: int) -> list[str]:
    """Return statements of the launcher's variables that contradict MPI.

    Only the variables of the inner launcher are compared, since they describe this process. An example is
    "SLURM_PROCID = 3, but MPI's rank is 1".

    Args:
        environment: Environment variables of this process.
        rank: Rank according to MPI.
        local_rank: Number of the rank on its node according to MPI.
        nodes: Number of nodes according to MPI.
    """
    seen = (("rank", rank), ("rank on the node", local_rank), ("number of nodes", nodes))
    return [
        f"{name} = {environment[name]}, but MPI's {what} is {value}"
        for name, (what, value) in zip(launcher_variables(environment)[1:], seen, strict=False)
        if environment.get(name, "").isdigit() and int(environment[name]) != value
    ]


def launched_size(environment: Mapping[str, str]) -> int:
    """Return the number of processes that the launcher has started; 1 without a launcher."""
    return next((int(environment[name]) for name in launcher_variables(environment)[:1]), 1)


def launched_rank(environment: Mapping[str, str]) -> int:
    """Return the rank of this process according to the launcher; 0 without a launcher."""
    values = (environment.get(name, "") for _, name, *_ in LAUNCHERS)
    return next((int(value) for value in values if value.isdigit()), 0)


def launcher_name(environment: Mapping[str, str]) -> str:
    """Return the name of the launcher for messages, such as "srun (Slurm)"."""
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return "mpirun of Open MPI"
    if "PALS_APID" in environment:
        return "PALS (Cray mpiexec)"
    # Slurm gives batch scripts and interactive shells step ids from 4294967290; no srun has started them.
    if "SLURM_STEP_NUM_TASKS" in environment and not environment.get("SLURM_STEP_ID", "").startswith(
        "429496"
    ):
        return "srun (Slurm)"
    if "PMI_SIZE" in environment or "PMI_RANK" in environment:
        return "mpiexec (Hydra, of MPICH or Intel MPI)"
    if "PMIX_RANK" in environment:
        return "a PMIx launcher"
    return "none (one process)"


def core_warning(threads: int, ranks: Sequence[tuple[object, Sequence[int]]]) -> str:
    """Return a warning if ranks have fewer cores than threads; "" otherwise.

    Args:
        threads: Number of threads with which each rank computes.
        ranks: Node of each rank, and the cores that the rank may use; () if the cores are unknown.
    """
    if threads == 1:
        return ""
    for rank, (node, own) in enumerate(ranks):
        here = [cores for other, cores in ranks if other == node]
        cores, threads_of_node = len(set().union(*here)), len(here) * threads
        if 0 < len(own) < threads:
            return (
                f"run.threads = {threads}, but rank {rank} may use only {counted(len(own), 'core')}: use "
                f"mpirun --map-by slot:PE={threads} or --bind-to none, srun --cpus-per-task={threads}, or "
                "fewer threads"
            )
        if 0 < cores < threads_of_node:
            return (
                f"run.threads = {threads}: the ranks of a node have {threads_of_node} threads but "
                f"{counted(cores, 'core')}; start fewer ranks per node, or use fewer threads"
            )
    return ""
