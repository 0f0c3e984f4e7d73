"""Batch job for a deck: the nodes, ranks, cores, GPUs, memory and time that it requests of a scheduler."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, gcd
from pathlib import Path
from types import MappingProxyType

from hpctrain.checkpoint.exchange.source import read_source_keys
from hpctrain.deck.check import check_world, world_problems
from hpctrain.deck.read import read_deck
from hpctrain.deck.replicas import fit_continued_replicas, fit_initial_replicas
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.mixture import tokens_exist
from hpctrain.errors import HpctrainError
from hpctrain.host.device import GPU_KINDS
from hpctrain.host.memory import shared_resident_bytes
from hpctrain.job.job_options import JobOptions, Launcher
from hpctrain.job.option_problems import option_problems
from hpctrain.plan.deck_plan import PlanOptions, plan_deck
from hpctrain.plan.deck_references import reference_problems
from hpctrain.plan.planned_device import assume_planned_device
from hpctrain.plan.search.deck_search import laid_out
from hpctrain.text import command, counted
from hpctrain.units import format_bytes, parse_bytes, parse_seconds

NODE_RANGE_SCHEDULERS = ("slurm", "lsf")
"""Schedulers that accept a range of nodes, and start the job on as many of them as are free."""

MEMORY_MARGIN = 1.25
"""Requested memory over predicted memory. The file cache of files that ranks read counts as their memory."""

SHARED_MEMORY = 1 << 30
"""Smallest size of /dev/shm in a pod, in bytes, which is enough for four ranks."""

_UNIT_OF_NUMBERS: Mapping[str, str] = MappingProxyType(
    {"slurm": "min", "lsf": "min", "flux": "min", "pbs": "s"}
)
"""Unit of a time that is a number alone, by scheduler."""


FEW_CORES = (
    "each rank gets 1 core, which is too few to feed a GPU: give --cores-per-rank C, such as the cores of a "
    "node divided by its ranks"
)
"""Warning for jobs with GPUs if nothing says how many cores a rank needs."""


@dataclass(frozen=True)
class Job:
    """Batch job that fits a deck.

    Attributes:
        options: Options of the user.
        path: Path of the deck.
        overrides: `--set` arguments of the deck.
        deck: The deck, with a layout for the largest number of nodes.
        launcher: Program that starts the ranks.
        ranks_per_node: Ranks of each node.
        gpus_per_node: GPUs that the job requests on each node; 0 for none.
        node_counts: Numbers of nodes that the layout can use, in ascending order.
        memory: Memory that the job requests on each node, in bytes; None if it is unknown.
        warnings: Sentences for the user.
    """

    options: JobOptions
    path: Path
    overrides: tuple[str, ...]
    deck: Deck
    launcher: Launcher
    ranks_per_node: int
    gpus_per_node: int
    node_counts: tuple[int, ...]
    memory: int | None
    warnings: tuple[str, ...]

    @property
    def name(self) -> str:
        """Title of the deck, without characters that schedulers or shells do not accept."""
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", self.deck.run.title).strip("-.") or "hpctrain"

    @property
    def shared_memory(self) -> int:
        """Size limit of /dev/shm in a pod, in bytes. MPI and NCCL exchange messages within a node there."""
        return self.options.shared_memory or max(SHARED_MEMORY, self.ranks_per_node * SHARED_MEMORY // 4)

    @property
    def cores_per_rank(self) -> int:
        """Cores that the job requests for each rank; by default as many as it has threads."""
        return self.options.cores_per_rank or self.deck.run.threads

    @property
    def core_warning(self) -> str:
        """Warning if ranks with GPUs get one core each since nothing says more; "" if they get more."""
        few = self.gpus_per_node and self.options.cores_per_rank is None and self.deck.run.threads == 1
        return FEW_CORES if few else ""

    @property
    def seconds(self) -> int:
        """Time limit of the job; one hour by default."""
        return self.options.seconds or 3600


def plan_job(path: Path, overrides: Sequence[str], options: JobOptions) -> Job:
    """Plan the batch job for a deck.

    Args:
        path: Path of the deck.
        overrides: `--set` arguments of the deck.
        options: Options of the job.

    Raises:
        HpctrainError: Options cannot be combined, the deck is wrong, or its layout does not fit the ranks.
    """
    _check_options(options, path, overrides)
    deck = assume_planned_device(
        read_deck(path, overrides, read_source=read_source_keys, check_files=reference_problems),
        options.gpus_per_node,
    )
    machine = deck.machine
    gpus = options.gpus_per_node if options.gpus_per_node is not None else machine.gpus_per_node or 0
    ranks = options.ranks_per_node or machine.ranks_per_node or gpus
    if not ranks:
        raise HpctrainError(
            f"{path}: the number of ranks per node is missing: add --ranks-per-node, or set "
            "machine.ranks_per_node or machine.gpus_per_node in the deck"
        )
    least, most = options.nodes
    deck = laid_out(deck, most * ranks, ranks)
    check_world(deck, most * ranks)
    for variant in options.variants:
        read_deck(path, [*overrides, *variant], most * ranks, read_source_keys, reference_problems)
    node_counts = tuple(n for n in range(least, most + 1) if _fits(deck, most * ranks, n * ranks))
    memory, warnings = _memory(path, overrides, deck, most * ranks, ranks)
    job = Job(
        options=options,
        path=path,
        overrides=tuple(overrides),
        deck=deck,
        launcher=options.launcher or ("srun" if options.scheduler == "slurm" else "mpirun"),
        ranks_per_node=ranks,
        gpus_per_node=gpus,
        node_counts=node_counts,
        memory=memory,
        warnings=(*_option_warnings(deck, most, ranks, gpus, options.cores_per_rank), *warnings),
    )
    return replace(job, warnings=(*job.warnings, job.core_warning)) if job.core_warning else job


def _fits(deck: Deck, most: int, ranks: int) -> bool:
    """Return True if a run that began on `most` ranks can continue on `ranks`, and can begin on `ranks`."""
    decks = fit_continued_replicas(deck, deck, most, ranks)[0], fit_initial_replicas(deck, ranks)[0]
    return not any(world_problems(each, ranks) for each in decks)


def parse_time(text: str, scheduler: str) -> int:
    """Return the seconds of a job's time, read as the scheduler itself reads it.

    Args:
        text: A time with units ("45 min", "1 h 30 min"), or as schedulers write it: "1:30:00",
            "2-12:00:00", a number alone (minutes; seconds with PBS), or two numbers with a colon (minutes and
            seconds; hours and minutes with LSF).
        scheduler: Name of the scheduler, as `hpctrain job --scheduler` has it.

    Raises:
        HpctrainError: The text is no time, has no unit that the scheduler would know, or is below a minute.
    """
    written = text.strip()
    if written.isdigit() and scheduler not in _UNIT_OF_NUMBERS:
        raise HpctrainError(f'--time {text}: has no unit: write "{text} min", or hours as "1:30:00"')
    if written.isdigit():
        written += f" {_UNIT_OF_NUMBERS[scheduler]}"
    elif scheduler == "lsf" and re.fullmatch(r"\d+:\d+", written):
        written += ":00"
    total = ceil(parse_seconds(written))
    if total < 60:
        raise HpctrainError(f"--time {text}: must be at least 1 min")
    return total


def parse_shared_memory(text: str) -> int:
    """Return the bytes of a size such as "8 GiB".

    Raises:
        HpctrainError: The text is not a size, or less than 1 MiB.
    """
    size = parse_bytes(text)
    if size < 1 << 20:
        raise HpctrainError(f"--shared-memory {text}: must be at least 1 MiB")
    return size


def parse_volume(text: str) -> tuple[str, str]:
    """Return the claim of a volume and the path where it is mounted, of "NAME:/path" or "NAME" (/work)."""
    claim, _, mount = text.partition(":")
    return claim, mount or "/work"


def parse_nodes(text: str) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes of a text such as "4" or "1-4".

    Raises:
        HpctrainError: The text is neither a number nor a range.
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < least <= most:
        raise HpctrainError(f"--nodes {text}: must be a number such as 4, or a range such as 1-4")
    return least, most


def _check_options(options: JobOptions, path: Path, overrides: Sequence[str]) -> None:
    problems = option_problems(options, path, overrides)
    least, most = options.nodes
    if least < most and options.scheduler not in NODE_RANGE_SCHEDULERS:
        problems.append(
            f"--nodes {least}-{most}: {options.scheduler} requires a fixed number of nodes, such as "
            f"--nodes {most} (slurm and lsf support a range)"
        )
    if options.variants and options.scheduler != "slurm":
        problems.append(
            f"--variant requires --scheduler slurm, not {options.scheduler}; write one script per variant "
            "with --set"
        )
    if options.mpi is not None and (options.scheduler != "slurm" or options.launcher == "mpirun"):
        problems.append(f"--mpi {options.mpi} requires --launcher srun")
    if options.launcher == "srun" and options.scheduler != "slurm":
        problems.append(f"--launcher srun requires --scheduler slurm, not {options.scheduler}; use mpirun")
    if problems:
        raise HpctrainError(problems)


def _option_warnings(deck: Deck, nodes: int, ranks: int, gpus: int, cores: int | None) -> list[str]:
    """Return warnings about choices with which the job would run slowly, or not at all."""
    warnings = []
    tensor = deck.layout.tensor
    if cores is not None and cores < deck.run.threads:
        warnings.append(
            f"--cores-per-rank {cores} is below run.threads = {deck.run.threads}: threads will share cores"
        )
    if nodes > 1 and ranks % tensor:
        warnings.append(
            f"layout.tensor = {tensor} does not divide the {ranks} ranks of a node, so that tensor ranks "
            f"communicate between nodes in every layer; use layout.tensor = {gcd(ranks, tensor)} or "
            f"{-(-ranks // tensor) * tensor} ranks per node"
        )
    if not gpus and deck.run.device in GPU_KINDS:
        warnings.append(
            f'run.device = "{deck.run.device}", but the job requests no GPUs: add --gpus-per-node, or set '
            "machine.gpus_per_node in the deck, unless the partition or a --directive requests them"
        )
    if 0 < gpus < ranks:
        warnings.append(f"{ranks} ranks share {counted(gpus, 'GPU')} of a node: start one rank per GPU")
    if gpus and deck.run.device == "cpu":
        warnings.append(f'run.device = "cpu" leaves {counted(gpus, "GPU")} of each node unused')
    return warnings


def _memory(
    path: Path, overrides: Sequence[str], deck: Deck, ranks: int, ranks_per_node: int
) -> tuple[int | None, list[str]]:
    """Return the memory of a node to request in bytes, and warnings if the run needs more than there is.

    `machine.memory` of the deck has precedence over the prediction. The memory is None if neither exists.
    There is no prediction if the vocabulary depends on a token file that does not exist yet. With GPUs, the
    plan predicts their memory, not that of the host. The code of libraries counts once for each node.
    """
    machine_memory = deck.machine.memory
    if deck.model.vocabulary is None and not tokens_exist(deck):
        return machine_memory, []
    sets = [*overrides, f"run.device={deck.run.device}"]
    plan = plan_deck(path, ranks, sets, PlanOptions(ranks_per_node, with_savings=False))
    demand = plan.demand
    if deck.run.device in GPU_KINDS:
        return machine_memory, [] if demand is None or demand.fits else [
            f"does not fit into GPU memory: {demand}"
        ]
    if machine_memory is not None:
        return machine_memory, [] if demand is None or demand.fits else [
            f"the {demand.ranks} ranks of a node need {format_bytes(demand.needed)} of memory, more than "
            f"machine.memory = {format_bytes(machine_memory)}; "
            f"{command('plan', path, '--ranks', ranks)} lists what would save most"
        ]
    shared = shared_resident_bytes() * (ranks_per_node - 1)
    return ceil((plan.memory.largest.memory.total * ranks_per_node - shared) * MEMORY_MARGIN), []
