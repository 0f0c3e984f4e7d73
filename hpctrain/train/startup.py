"""Before a run: whether all nodes see the same files, have as many ranks, and where the ranks sit."""

from __future__ import annotations

import hashlib
import logging
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import torch

from hpctrain.checkpoint.exchange.source import settled_keys
from hpctrain.comm.device import on_host
from hpctrain.comm.launcher import crowding
from hpctrain.comm.watchdog import REPORT_REQUEST
from hpctrain.comm.world import World
from hpctrain.deck.read import changed_deck, deck_text, read_deck
from hpctrain.deck.schema import Deck, require_trusted_code
from hpctrain.deck.toml import DECK_BYTES
from hpctrain.engine.sizes import crosses
from hpctrain.errors import HpctrainError
from hpctrain.files import read_bytes, write_text
from hpctrain.watch.dashboards import require_packages
from hpctrain.watch.folder import take_folder

SECONDS_TO_APPEAR = 5.0  # a network file system may take to show one node what another has written


def check_deck_file(world: World, path: Path) -> None:
    """HpctrainError on all ranks where rank 0 reads a deck that others do not see, or see another one."""
    digests = world.everyone.all_gather_object(_digest(path))
    hosts = world.everyone.all_gather_object(world.hostname)
    if digests[0] is None:
        return  # nobody need go further than what rank 0 will say of it
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        rank = others[0]
        what = "cannot read it" if digests[rank] is None else "reads another file of that name"
        with world.agreement():
            raise HpctrainError(
                f"{path}: rank 0 on {hosts[0]} reads this deck, but rank {rank} on {hosts[rank]} {what}; "
                "put it in a folder that all nodes share"
            )


def read_agreed(world: World, source: Path | Deck, overrides: Sequence[str], ranks: int | None) -> Deck:
    """The deck of a file, as all ranks see it, or one that a script has made, the same on all; with `--set`
    arguments. Collective; errors as in `read_deck`, on all ranks.
    """
    if isinstance(source, Path):
        check_deck_file(world, source)
        with world.agreement():
            return read_deck(source, overrides, ranks, settled_keys)
    text = deck_text(source)
    alike = len(set(world.everyone.all_gather_object(text))) == 1
    with world.agreement():
        if not alike:
            raise HpctrainError(
                "the deck that was made is not the same on all ranks; make it of the same values"
            )
        deck = changed_deck(source, overrides, ranks, source.sources.name, settled_keys, from_user=True)
        require_trusted_code(deck, source.sources.name)
        return deck


def check_nodes(world: World) -> None:
    """HpctrainError on all ranks where the nodes have different numbers of ranks."""
    ranks = world.everyone.all_gather_object((world.node, world.hostname, world.local_size))
    sizes = {node: (hostname, size) for node, hostname, size in ranks}
    few = min(sizes.values(), key=lambda each: each[1])
    many = max(sizes.values(), key=lambda each: each[1])
    with world.agreement():
        if few[1] != many[1]:
            raise HpctrainError(
                f"{world.size} ranks are spread unevenly over {world.nodes} nodes, {many[1]} on {many[0]} "
                f"and {few[1]} on {few[0]}: start as many on every node, with srun --ntasks-per-node or "
                "mpirun --map-by ppr:N:node"
            )


def check_run_folder(world: World, folder: Path) -> None:
    """HpctrainError on all ranks where some do not see what rank 0 writes into the run's folder.

    The folder is made if it is not there.
    """
    token = ""
    with world.agreement():
        if world.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            token = f".seen-{uuid.uuid4().hex}"
            (folder / token).touch()
    path = folder / world.everyone.broadcast_object(token)
    deadline = time.monotonic() + SECONDS_TO_APPEAR
    while not (seen := path.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    ranks = world.everyone.all_gather_object((seen, world.hostname))
    blind = [rank for rank, (sees, _) in enumerate(ranks) if not sees]
    with world.agreement():
        if world.rank == 0:
            path.unlink(missing_ok=True)
        if blind:
            raise HpctrainError(
                f"run.dir = {folder}: rank {blind[0]} on {ranks[blind[0]][1]} does not see what rank 0 on "
                f"{ranks[0][1]} writes there; choose a folder on a file system that all nodes share"
            )


class RunFolder:
    """The folder of a run, locked by this job from before its first write until its end.

    The folder is marked as a run's before anything else is written. So if the job is killed before the first
    step, `hpctrain run` recognizes the files in it and can begin again.
    """

    def __init__(self, world: World, deck: Deck) -> None:
        self.world, self.deck, self.path = world, deck, Path(deck.run.dir)
        self._lock: TextIO | None = None
        self._is_taken = False

    def take(self) -> None:
        """Lock the folder, mark it as a run's and write the deck there. Further calls do nothing. Collective.

        Raises:
            HpctrainError: Another job has locked the folder, or not all ranks see it; raised on all ranks.
        """
        if self._is_taken:
            return
        before, self.world.ledger.activity = self.world.ledger.activity, "taking the run folder"
        with self.world.agreement():
            if self.world.rank == 0:
                self._lock = take_folder(self.path)
        check_run_folder(self.world, self.path)
        with self.world.agreement():
            if self.world.rank == 0:
                (self.path / "checkpoints").mkdir(exist_ok=True)
                new = self.path / "deck.toml.new"
                write_text(new, deck_text(self.deck))
                new.replace(self.path / "deck.toml")
                (self.path / REPORT_REQUEST).unlink(missing_ok=True)  # of an earlier job
        self._is_taken = True
        self.world.ledger.activity = before

    def close(self) -> None:
        """Release the lock on the folder."""
        if self._lock is not None:
            self._lock.close()
        self._is_taken = False


def crossing(world: World, deck: Deck) -> str:
    """A warning where tensor ranks of one group sit on several nodes; "" where none do. Collective."""
    nodes = world.nodes_of(range(world.size))
    tensor, together = deck.layout.tensor, world.topology.ranks_per_node
    if not crosses(nodes, tensor):
        return ""
    return (
        f"layout.tensor = {tensor}: tensor ranks sit on several nodes and talk over the network in every "
        f"layer; with {together} ranks on a node, a size that divides {together} keeps them together"
    )


def half_on_host(deck: Deck, device: torch.device) -> str:
    """Return a warning if the deck asks a CPU to compute in fp16; "" otherwise."""
    if deck.precision.compute != "fp16" or not on_host(device):
        return ""
    return (
        'precision.compute = "fp16" is slow on a CPU, and small gradients need a loss scale '
        '("bf16" needs none, and "fp32" is often quicker there)'
    )


def bind(world: World, threads: int) -> str:
    """Give each rank of a node its own cores, if the launcher left all of them to all; in words, which.

    Nothing is done, and "" returned, where the launcher has bound the ranks or the cores do not suffice.
    Collective.
    """
    mine = _cores()
    ranks = world.everyone.all_gather_object((world.node, mine))
    here = [cores for node, cores in ranks if node == world.node]
    possible = len(set(here)) == 1 and len(mine) >= len(here) * threads
    if not all(world.everyone.all_gather_object(possible)):
        return ""
    share = len(mine) // len(here)
    own = mine[world.local_rank * share : (world.local_rank + 1) * share]
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), own)
    idle = f", of which {threads} compute{'s' * (threads == 1)} (run.threads)" if share > threads else ""
    return f"ranks are bound to {share} core{'s' * (share > 1)} each{idle}"


def _cores() -> tuple[int, ...]:
    """Those that this process may use; none where the system does not tell."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def prepare_ranks(world: World, deck: Deck) -> str:
    """Refuse uneven nodes and missing packages, warn of what is slow, and bind ranks if the deck says so.

    Collective; nothing is written. Warnings are of a tensor axis across nodes, of threads without cores and
    of fp16 on a CPU.

    Returns:
        To what the ranks are bound, in words; "" if they are not.
    """
    with world.agreement():
        if world.rank == 0:
            require_packages(deck)
    check_nodes(world)
    cores = world.everyone.all_gather_object((world.hostname, _cores()))
    warnings = crossing(world, deck), crowding(deck.run.threads, cores), half_on_host(deck, world.device)
    for warning in warnings:
        if warning and world.rank == 0:
            logging.getLogger("hpctrain").warning("%s", warning)
    return bind(world, deck.run.threads) if deck.machine.bind else ""


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(read_bytes(path, DECK_BYTES)).hexdigest()
    except OSError:
        return None
