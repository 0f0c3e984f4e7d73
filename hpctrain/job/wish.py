"""What a user says of a batch job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scheduler = Literal["slurm", "pbs", "lsf", "flux", "kubernetes"]
Launcher = Literal["srun", "mpirun"]


@dataclass(frozen=True)
class Wish:
    """What the user says of a job, beside the deck; None: by the deck's [machine], or a default.

    `nodes` are the fewest and the most; `variants` are further `--set` arguments, one tuple for each task
    of an array of jobs, which get titles and run folders by its number, or have them, where `folders` are
    given; `directives` are further options for the scheduler, `modules` what the script loads.
    On Kubernetes, `volume` is a claim and where it is mounted, `shared_memory` the size of /dev/shm in bytes.
    """

    scheduler: Scheduler
    nodes: tuple[int, int] = (1, 1)
    seconds: int | None = None
    launcher: Launcher | None = None
    ranks_per_node: int | None = None
    gpus_per_node: int | None = None
    account: str | None = None
    partition: str | None = None
    variants: tuple[tuple[str, ...], ...] = ()
    folders: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    image: str | None = None
    volume: tuple[str, str] | None = None
    shared_memory: int | None = None
