"""What the launcher of this process says about it, before and beside MPI. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping

# An outer launcher often starts an inner one (Slurm starts Open MPI's daemons), so the inner one counts.
LAUNCHER_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
LAUNCHER_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


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
