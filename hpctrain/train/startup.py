"""Start of a run on all ranks: checks of deck, nodes and run folder, its lock, and binding to cores."""

from __future__ import annotations

import hashlib
import logging
import os
import time
import uuid
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TextIO

import torch

from hpctrain.checkpoint.exchange.source import read_source_keys
from hpctrain.comm.hangs.watchdog import REPORT_REQUEST
from hpctrain.comm.world import World
from hpctrain.deck.read import changed_deck, read_deck
from hpctrain.deck.schema import Deck, require_trusted_code
from hpctrain.deck.toml import MAX_DECK_BYTES
from hpctrain.deck.toml_text import deck_text
from hpctrain.engine.mesh_sizes import spans_nodes
from hpctrain.errors import HpctrainError
from hpctrain.files import read_bytes, write_text
from hpctrain.host.device import on_host
from hpctrain.host.launcher import core_warning
from hpctrain.watch.dashboards import require_packages
from hpctrain.watch.folder import lock_run_folder

SECONDS_TO_APPEAR = 5.0
"""Time after which a file that one node has written must be visible on all nodes, in seconds."""


def check_deck_file(world: World, path: Path) -> None:
    """Check that all ranks read the same deck from `path`. Collective.

    Nothing is checked if rank 0 cannot read the file, since reading the deck reports that error.

    Raises:
        HpctrainError: A rank cannot read the file, or reads another file than rank 0; raised on all ranks.
    """
    digests = world.everyone.all_gather_object(_digest(path))
    hosts = world.everyone.all_gather_object(world.hostname)
    if digests[0] is None:
        return  # rank 0 reports the error when it reads the deck
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        rank = differing[0]
        problem = "cannot read it" if digests[rank] is None else "reads another file of that name"
        with world.agreement():
            raise HpctrainError(
                f"{path}: rank 0 on {hosts[0]} reads this deck, but rank {rank} on {hosts[rank]} {problem}; "
                "put it in a folder that all nodes share"
            )


def _check_same_keys(world: World, deck: Deck, path: Path) -> None:
    """Check that a deck has the same keys on all ranks, with included files and arguments. Collective."""
    lines = deck_text(deck).splitlines()
    everyone = world.everyone
    digests = everyone.all_gather_object(hashlib.sha256("\n".join(lines).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    texts = everyone.all_gather_object((world.hostname, lines))
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    (first_host, first), (host, other) = texts[0], texts[rank]
    here, there = next(pair for pair in zip_longest(first, other, fillvalue="nothing") if pair[0] != pair[1])
    with world.agreement():
        raise HpctrainError(
            f"{path}: rank 0 on {first_host} reads {here}, but rank {rank} on {host} reads {there}, from "
            "files that the deck includes or from --set; put the files in a folder that all nodes share, and "
            "start all ranks with the same arguments"
        )


def read_deck_on_all_ranks(
    world: World, source: Path | Deck, overrides: Sequence[str], ranks: int | None
) -> Deck:
    """Return the deck of a file or of a script, after a check that it is the same on all ranks. Collective.

    Args:
        world: The world.
        source: Path of a deck, or a deck that a script has made.
        overrides: `--set` arguments.
        ranks: Number of ranks of the run; None if the deck may be for another number of ranks.

    Raises:
        HpctrainError: The deck is invalid, or differs between ranks; raised on all ranks.
    """
    if isinstance(source, Path):
        check_deck_file(world, source)
        with world.agreement():
            deck = read_deck(source, overrides, ranks, read_source_keys)
        _check_same_keys(world, deck, source)
        return deck
    text = deck_text(source)
    is_same = len(set(world.everyone.all_gather_object(text))) == 1
    with world.agreement():
        if not is_same:
            raise HpctrainError(
                "the deck differs between ranks; every rank must build it from the same values"
            )
        deck = changed_deck(source, overrides, ranks, source.sources.name, read_source_keys, from_user=True)
        require_trusted_code(deck, source.sources.name)
        return deck


def configure_rank(world: World, deck: Deck) -> None:
    """Set the number of threads, the time limit of the watchdog and the device, as the deck says."""
    torch.set_num_threads(deck.run.threads)
    world.hang.set_limit(deck.stability.hang_seconds)
    world.use_device(deck.run.device, deck.machine.deterministic)


def check_nodes(world: World) -> None:
    """Check that all nodes have the same number of ranks. Collective.

    Raises:
        HpctrainError: The numbers differ; raised on all ranks.
    """
    ranks = world.everyone.all_gather_object((world.node, world.hostname, world.local_size))
    sizes = {node: (hostname, size) for node, hostname, size in ranks}
    few = min(sizes.values(), key=lambda each: each[1])
    many = max(sizes.values(), key=lambda each: each[1])
    with world.agreement():
        if few[1] != many[1]:
            raise HpctrainError(
                f"{world.size} ranks are spread unevenly over {world.nodes} nodes, {many[1]} on {many[0]} "
                f"and {few[1]} on {few[0]}: start the same number on every node, with srun --ntasks-per-node "
                "or mpirun --map-by ppr:N:node"
            )


def check_run_folder(world: World, folder: Path) -> None:
    """Create the folder of the run if necessary, and check that all ranks see what rank 0 writes. Collective.

    Raises:
        HpctrainError: A rank does not see a file that rank 0 has written; raised on all ranks.
    """
    token = ""
    with world.agreement():
        if world.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            token = f".seen-{uuid.uuid4().hex}"  # run_files.py knows this name
            (folder / token).touch()
    path = folder / world.everyone.broadcast_object(token)
    deadline = time.monotonic() + SECONDS_TO_APPEAR
    while not (visible := path.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    ranks = world.everyone.all_gather_object((visible, world.hostname))
    without_file = [rank for rank, (sees, _) in enumerate(ranks) if not sees]
    with world.agreement():
        if world.rank == 0:
            path.unlink(missing_ok=True)
        if without_file:
            raise HpctrainError(
                f"run.dir = {folder}: rank {without_file[0]} on {ranks[without_file[0]][1]} does not see "
                f"what rank 0 on {ranks[0][1]} writes there; choose a folder on a file system that "
                "all nodes share"
            )


class RunFolder:
    """The folder of a run, locked by this job from before its first write until its end.

    The folder is marked as a run's before anything else is written. So if the job is killed before the first
    step, `hpctrain run` recognizes the files in it and can begin again.
    """

    def __init__(self, world: World, deck: Deck) -> None:
        self.world, self.deck, self.path = world, deck, Path(deck.run.dir)
        self._lock: TextIO | None = None
        self._is_locked = False

    def lock(self) -> None:
        """Lock the folder, mark it as a run's and write the deck there. Further calls do nothing. Collective.

        Raises:
            HpctrainError: Another job has locked the folder, or not all ranks see it; raised on all ranks.
        """
        if self._is_locked:
            return
        earlier_activity, self.world.ledger.activity = self.world.ledger.activity, "locking the run folder"
        with self.world.agreement():
            if self.world.rank == 0:
                self._lock = lock_run_folder(self.path)
        check_run_folder(self.world, self.path)
        with self.world.agreement():
            if self.world.rank == 0:
                (self.path / "checkpoints").mkdir(exist_ok=True)
                new = self.path / "deck.toml.new"
                write_text(new, deck_text(self.deck))
                new.replace(self.path / "deck.toml")
                (self.path / REPORT_REQUEST).unlink(missing_ok=True)  # of an earlier job
        self._is_locked = True
        self.world.ledger.activity = earlier_activity

    def close(self) -> None:
        """Release the lock on the folder."""
        if self._lock is not None:
            self._lock.close()
        self._is_locked = False


def tensor_group_warning(world: World, deck: Deck) -> str:
    """Return a warning if the ranks of a tensor group are on several nodes; "" otherwise. Collective."""
    nodes = world.nodes_of(range(world.size))
    tensor, ranks_per_node = deck.layout.tensor, world.topology.ranks_per_node
    if not spans_nodes(nodes, tensor):
        return ""
    return (
        f"layout.tensor = {tensor}: the ranks of a tensor group are on several nodes and communicate over "
        f"the network in every layer; a size that divides the {ranks_per_node} ranks per node avoids this"
    )


def fp16_on_cpu_warning(deck: Deck, device: torch.device) -> str:
    """Return a warning if the deck asks a CPU to compute in fp16; "" otherwise."""
    if deck.precision.compute != "fp16" or not on_host(device):
        return ""
    return (
        'precision.compute = "fp16" is slow on a CPU, and small gradients need a loss scale '
        '("bf16" needs none, and "fp32" is often quicker there)'
    )


def bind_ranks(world: World, threads: int) -> str:
    """Bind each rank of a node to cores of its own. Collective.

    If the launcher has already bound the ranks, or the node has fewer cores than threads, nothing is changed.

    Args:
        world: The world.
        threads: Number of threads with which each rank computes (`run.threads`).

    Returns:
        A sentence about the cores that each rank got; "" if nothing was changed.
    """
    cores = _cores()
    cores_of_ranks = world.everyone.all_gather_object((world.node, cores))
    node_cores = [each for node, each in cores_of_ranks if node == world.node]
    possible = len(set(node_cores)) == 1 and len(cores) >= len(node_cores) * threads
    if not all(world.everyone.all_gather_object(possible)):
        return ""
    share = len(cores) // len(node_cores)
    rank_cores = cores[world.local_rank * share : (world.local_rank + 1) * share]
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), rank_cores)
    idle = f", of which {threads} compute{'s' * (threads == 1)} (run.threads)" if share > threads else ""
    return f"ranks are bound to {share} core{'s' * (share > 1)} each{idle}"


def _cores() -> tuple[int, ...]:
    """Return the cores that this process may use; () if the system does not provide them."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def prepare_ranks(world: World, deck: Deck) -> str:
    """Check the nodes and packages of a run, log warnings, and bind ranks if the deck asks for it.

    This call is collective. There are warnings about tensor groups on several nodes, threads without
    cores, and fp16 on a CPU.

    Returns:
        A sentence about the cores that each rank is bound to; "" if the ranks are not bound.

    Raises:
        HpctrainError: Nodes have different numbers of ranks, or a package is missing; raised on all ranks.
    """
    with world.agreement():
        if world.rank == 0:
            require_packages(deck)
    check_nodes(world)
    cores = world.everyone.all_gather_object((world.hostname, _cores()))
    warnings = (
        tensor_group_warning(world, deck),
        core_warning(deck.run.threads, cores),
        fp16_on_cpu_warning(deck, world.device),
    )
    for warning in warnings:
        if warning and world.rank == 0:
            logging.getLogger("hpctrain").warning("%s", warning)
    return bind_ranks(world, deck.run.threads) if deck.machine.bind else ""


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(read_bytes(path, MAX_DECK_BYTES)).hexdigest()
    except OSError:
        return None
