"""What a batch job for a deck asks a scheduler for: nodes, ranks, cores, GPUs, memory, time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, gcd
from pathlib import Path
from types import MappingProxyType

from hpctrain.checkpoint.exchange.source import settled_keys
from hpctrain.deck.check import check_world, world_problems
from hpctrain.deck.read import read_deck
from hpctrain.deck.replicas import fit_continued_replicas, fit_initial_replicas
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.mixture import tokens_exist
from hpctrain.errors import HpctrainError
from hpctrain.host.device import GPU_KINDS
from hpctrain.job.job_options import JobOptions, Launcher
from hpctrain.job.words import word_problems
from hpctrain.plan.deck import plan_deck
from hpctrain.plan.named import named_problems
from hpctrain.plan.planned_device import assume_planned_device
from hpctrain.plan.search.deck import laid_out
from hpctrain.text import command, counted
from hpctrain.units import format_bytes, parse_bytes, parse_seconds

ON_A_RANGE = ("slurm", "lsf")  # schedulers that start a job on as many nodes of a range as they have

MEMORY_MARGIN = 1.25  # asked for, over what is predicted: the file cache of what ranks read counts as theirs

SHARED_MEMORY = 1 << 30  # bytes of /dev/shm in a pod, and as much for every four ranks

_UNIT_OF_NUMBERS: Mapping[str, str] = MappingProxyType(
    {"slurm": "min", "lsf": "min", "flux": "min", "pbs": "s"}
)
"""Unit of a time that is a number alone, by scheduler."""


FEW_CORES = (
    "each rank gets 1 core, which is too few to feed a GPU: give --cores-per-rank C, such as the cores of a "
    "node divided by its ranks"
)


@dataclass(frozen=True)
class Job:
    """A job that fits the deck. `fitting` are the numbers of nodes, rising, that its layout can use.

    `memory` is in bytes a node, None where nothing is known of it. `warnings` are sentences for the user.
    """

    wish: JobOptions
    path: Path
    overrides: tuple[str, ...]
    deck: Deck
    launcher: Launcher
    ranks_per_node: int
    gpus_per_node: int
    fitting: tuple[int, ...]
    memory: int | None
    warnings: tuple[str, ...]

    @property
    def name(self) -> str:
        """The deck's title as schedulers and shells take it."""
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", self.deck.run.title).strip("-.") or "hpctrain"

    @property
    def shared_memory(self) -> int:
        """Bytes of a pod's /dev/shm at most: through it MPI and NCCL pass what stays within a node."""
        return self.wish.shared_memory or max(SHARED_MEMORY, self.ranks_per_node * SHARED_MEMORY // 4)

    @property
    def cores_per_rank(self) -> int:
        """Cores that each rank is given: by default as many as it has threads."""
        return self.wish.cores_per_rank or self.deck.run.threads

    @property
    def few_cores(self) -> str:
        """Sentence about GPU ranks that are given a core each only because nothing says more; else ""."""
        few = self.gpus_per_node and self.wish.cores_per_rank is None and self.deck.run.threads == 1
        return FEW_CORES if few else ""

    @property
    def seconds(self) -> int:
        """Time of the job, an hour where none is given."""
        return self.wish.seconds or 3600


def plan_job(path: Path, overrides: Sequence[str], wish: JobOptions) -> Job:
    """The job that a deck and a wish make; HpctrainError with all that does not fit."""
    _check(wish, path, overrides)
    deck = assume_planned_device(
        read_deck(path, overrides, read_source=settled_keys, check_files=named_problems), wish.gpus_per_node
    )
    machine = deck.machine
    gpus = wish.gpus_per_node if wish.gpus_per_node is not None else machine.gpus_per_node or 0
    ranks = wish.ranks_per_node or machine.ranks_per_node or gpus
    if not ranks:
        raise HpctrainError(
            f"{path}: the number of ranks per node is missing: add --ranks-per-node, or set "
            "machine.ranks_per_node or machine.gpus_per_node in the deck"
        )
    least, most = wish.nodes
    deck = laid_out(deck, most * ranks, ranks)
    check_world(deck, most * ranks)
    for variant in wish.variants:
        read_deck(path, [*overrides, *variant], most * ranks, settled_keys, named_problems)
    fitting = tuple(n for n in range(least, most + 1) if _fits(deck, most * ranks, n * ranks))
    memory, warnings = _memory(path, overrides, deck, most * ranks, ranks)
    job = Job(
        wish=wish,
        path=path,
        overrides=tuple(overrides),
        deck=deck,
        launcher=wish.launcher or ("srun" if wish.scheduler == "slurm" else "mpirun"),
        ranks_per_node=ranks,
        gpus_per_node=gpus,
        fitting=fitting,
        memory=memory,
        warnings=(*_choices_to_reconsider(deck, most, ranks, gpus, wish.cores_per_rank), *warnings),
    )
    return replace(job, warnings=(*job.warnings, job.few_cores)) if job.few_cores else job


def _fits(deck: Deck, most: int, ranks: int) -> bool:
    """Whether a run of the deck that has begun on `most` ranks goes on with so many, and could begin so."""
    decks = fit_continued_replicas(deck, deck, most, ranks)[0], fit_initial_replicas(deck, ranks)[0]
    return not any(world_problems(each, ranks) for each in decks)


def parse_time(text: str, scheduler: str) -> int:
    """Return the seconds of a job's time, read as the scheduler itself reads it.

    Args:
        text: A time with units ("45 min", "1 h 30 min"), or as schedulers write it: "1:30:00",
        "2-12:00:00", a number
            alone (minutes; seconds with PBS), or two numbers with a colon (minutes and seconds; hours and
            minutes with LSF).
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
    """Bytes of a size such as "8 GiB"; HpctrainError for anything else, and for less than 1 MiB."""
    size = parse_bytes(text)
    if size < 1 << 20:
        raise HpctrainError(f"--shared-memory {text}: must be at least 1 MiB")
    return size


def parse_volume(text: str) -> tuple[str, str]:
    """The claim of a volume, and where it is mounted: "NAME:/path", or "NAME" for /work."""
    claim, _, mount = text.partition(":")
    return claim, mount or "/work"


def parse_nodes(text: str) -> tuple[int, int]:
    """The fewest and the most nodes of "4" or of "1-4"; HpctrainError for anything else."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < least <= most:
        raise HpctrainError(f"--nodes {text}: must be a number such as 4, or a range such as 1-4")
    return least, most


def _check(wish: JobOptions, path: Path, overrides: Sequence[str]) -> None:
    problems = word_problems(wish, path, overrides)
    least, most = wish.nodes
    if least < most and wish.scheduler not in ON_A_RANGE:
        problems.append(
            f"--nodes {least}-{most}: {wish.scheduler} requires a fixed number of nodes, such as "
            f"--nodes {most} (slurm and lsf support a range)"
        )
    if wish.variants and wish.scheduler != "slurm":
        problems.append(
            f"--variant requires --scheduler slurm, not {wish.scheduler}; write one script per variant "
            "with --set"
        )
    if wish.mpi is not None and (wish.scheduler != "slurm" or wish.launcher == "mpirun"):
        problems.append(f"--mpi {wish.mpi} requires --launcher srun")
    if wish.launcher == "srun" and wish.scheduler != "slurm":
        problems.append(f"--launcher srun requires --scheduler slurm, not {wish.scheduler}; use mpirun")
    if problems:
        raise HpctrainError(problems)


def _choices_to_reconsider(deck: Deck, nodes: int, ranks: int, gpus: int, cores: int | None) -> list[str]:
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
    """Return the bytes per node to ask for, and warnings if less is there than is predicted.

    Nothing is predicted if the vocabulary would come from a token file that is not there yet. On GPUs the
    plan is of their memory, so that the host memory to ask for is only known if the deck says it.
    """
    given = deck.machine.memory
    if deck.model.vocabulary is None and not tokens_exist(deck):
        return given, []
    sets = [*overrides, f"run.device={deck.run.device}"]
    plan = plan_deck(path, ranks, sets, ranks_per_node, advised=False)
    if deck.run.device in GPU_KINDS:
        room = plan.room
        return given, [] if room is None or room.fits else [f"does not fit into GPU memory: {room}"]
    predicted = plan.memory.largest.memory.total * ranks_per_node
    if given is not None and predicted > given:
        return given, [
            f"the {ranks_per_node} ranks of a node need {format_bytes(predicted)} of memory, more than "
            f"machine.memory = {format_bytes(given)}; "
            f"{command('plan', path, '--ranks', ranks)} lists what would save most"
        ]
    return given or ceil(predicted * MEMORY_MARGIN), []
