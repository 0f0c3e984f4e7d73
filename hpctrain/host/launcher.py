"""What the launcher of this process says about it, before and beside MPI. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.words import counted

# Each launcher's own view of a process: number of processes, rank, rank on the node, number of nodes. An
# outer launcher often starts an inner one (Slurm starts Open MPI's daemons), so the inner one counts.
LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", ""),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", ""),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES"),
)


_OF_RANKS = (
    *("OMPI_", "PMIX_", "PMI_", "PRTE_", "PALS_", "HYDRA_", "HYDI_", "MPI_LOCAL", "MPIR_"),
    *("SLURM_STEP", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_TASK_PID"),
)
"""How names begin that tell a process which rank it is."""


def environment_without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """That of a process which a rank starts and which is none: importing mpi4py there starts no MPI."""
    kept = {name: value for name, value in environment.items() if not name.startswith(_OF_RANKS)}
    return {**kept, "MPI4PY_RC_INITIALIZE": "0"}


def launcher_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the inner launcher's variables, as in LAUNCHERS; none without a launcher."""
    return next((names for names in LAUNCHERS if environment.get(names[0], "").isdigit()), ())


def find_contradictions(environment: Mapping[str, str], rank: int, local_rank: int, nodes: int) -> list[str]:
    """What the launcher's variables say otherwise than MPI, such as "SLURM_PROCID = 3, but MPI's rank is 1".

    Only the inner launcher's variables are about this process.
    """
    seen = (("rank", rank), ("rank on the node", local_rank), ("number of nodes", nodes))
    return [
        f"{name} = {environment[name]}, but MPI's {what} is {value}"
        for name, (what, value) in zip(launcher_variables(environment)[1:], seen, strict=False)
        if environment.get(name, "").isdigit() and int(environment[name]) != value
    ]


def launched_size(environment: Mapping[str, str]) -> int:
    """How many processes the launcher says it started; 1 without a launcher."""
    return next((int(environment[name]) for name in launcher_variables(environment)[:1]), 1)


def launched_rank(environment: Mapping[str, str]) -> int:
    """Which of them this is, from 0."""
    values = (environment.get(name, "") for _, name, *_ in LAUNCHERS)
    return next((int(value) for value in values if value.isdigit()), 0)


def launcher_name(environment: Mapping[str, str]) -> str:
    """Return the name of the launcher for messages, such as "srun (Slurm)"."""
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return "mpirun of Open MPI"
    if "PALS_APID" in environment:
        return "PALS (Cray mpiexec)"
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
        cores, wanted = len(set().union(*here)), len(here) * threads
        if 0 < len(own) < threads:
            return (
                f"run.threads = {threads}, but rank {rank} may use {counted(len(own), 'core')} alone: give "
                f"mpirun --map-by slot:PE={threads} or --bind-to none, srun --cpus-per-task={threads}, or it "
                "fewer threads"
            )
        if 0 < cores < wanted:
            return (
                f"run.threads = {threads}: {wanted} threads of a node's ranks take turns on "
                f"{counted(cores, 'core')}; start fewer ranks there, or give them fewer threads"
            )
    return ""
