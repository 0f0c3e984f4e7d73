"""Options of `hpctrain job`, from which a batch job is planned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scheduler = Literal["slurm", "pbs", "lsf", "flux", "kubernetes"]
Launcher = Literal["srun", "mpirun"]


@dataclass(frozen=True)
class JobOptions:
    """Options of a batch job for a deck.

    None means the value in [machine] of the deck, or else a default.

    Attributes:
        scheduler: The scheduler that the script is for.
        nodes: The fewest and the most nodes.
        seconds: Time limit of the job.
        launcher: Program that starts the ranks.
        ranks_per_node: Ranks of each node.
        gpus_per_node: GPUs of each node.
        cores_per_rank: Cores that the job requests for each rank; None for as many as it has threads.
        mpi: Name of `srun --mpi=list`, by which srun starts MPI ranks; None for "pmix".
        account: Account that the scheduler charges.
        partition: Partition or queue.
        variants: Further `--set` arguments, one tuple for each task of an array of jobs.
        folders: Run folder of each task. If empty, tasks get titles and folders by their numbers.
        directives: Further options for the scheduler.
        modules: Environment modules that the script loads.
        image: Container image (Kubernetes).
        volume: Volume claim, and the path where it is mounted (Kubernetes).
        shared_memory: Size of /dev/shm in bytes (Kubernetes).
    """

    scheduler: Scheduler
    nodes: tuple[int, int] = (1, 1)
    seconds: int | None = None
    launcher: Launcher | None = None
    ranks_per_node: int | None = None
    gpus_per_node: int | None = None
    cores_per_rank: int | None = None
    mpi: str | None = None
    account: str | None = None
    partition: str | None = None
    variants: tuple[tuple[str, ...], ...] = ()
    folders: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    image: str | None = None
    volume: tuple[str, str] | None = None
    shared_memory: int | None = None
