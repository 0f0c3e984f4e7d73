"""What the launcher of this process says about it, before and beside MPI. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping

# An outer launcher often starts an inner one (Slurm starts Open MPI's daemons), so the inner one counts.
LAUNCHER_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
LAUNCHER_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


# Each launcher's own view of a process: its rank, its rank on the node, the number of nodes.
LAUNCHER_PLACES = {
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", ""),
    "PMI_SIZE": ("PMI_RANK", "MPI_LOCALRANKID", ""),
    "SLURM_STEP_NUM_TASKS": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES"),
}


def contradictions(environment: Mapping[str, str], rank: int, local_rank: int, nodes: int) -> list[str]:
    """What the launcher's variables say otherwise than MPI, such as "SLURM_PROCID = 3, but MPI's rank is 1".

    Only the inner launcher's variables are about this process.
    """
    mark = next((name for name in LAUNCHER_SIZES if environment.get(name, "").isdigit()), None)
    if mark is None:
        return []
    seen = (("rank", rank), ("rank on the node", local_rank), ("number of nodes", nodes))
    return [
        f"{name} = {environment[name]}, but MPI's {what} is {value}"
        for name, (what, value) in zip(LAUNCHER_PLACES[mark], seen, strict=True)
        if environment.get(name, "").isdigit() and int(environment[name]) != value
    ]


def started_size(environment: Mapping[str, str]) -> int:
    """How many processes the launcher says it started; 1 without a launcher."""
    return _first_number(LAUNCHER_SIZES, environment, 1)


def started_rank(environment: Mapping[str, str]) -> int:
    """Which of them this is, from 0."""
    return _first_number(LAUNCHER_RANKS, environment, 0)


def launcher_name(environment: Mapping[str, str]) -> str:
    """The launcher in words, or "none"."""
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


def _first_number(names: tuple[str, ...], environment: Mapping[str, str], default: int) -> int:
    for name in names:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return default
