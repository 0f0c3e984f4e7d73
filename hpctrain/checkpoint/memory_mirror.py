"""Mirrors: copies of the state of each rank in the memory of its node and of a neighbour node.

A mirror is written during training. A thread copies this rank's slices into a file in the memory of its node
(copy-on-write, as in `copy_on_write`). In the next steps, the ranks send the files to each other in rounds.
The messages of a round are in flight during a step. All ranks begin and continue after the same steps.

There are slots for two mirrors: the newest complete one, and the one that is being written, which becomes
valid when all ranks have received it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain.checkpoint.agree import raise_on_all_ranks
from hpctrain.checkpoint.mirror_folder import (
    MEMORY,
    create_mirror_folder,
    new_token,
    part_path,
    remove_mirrors,
)
from hpctrain.checkpoint.mirror_slot import HEADER_BYTES, Memory, MirrorSlot, SlotContents, SlotCopy
from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.comm.work import Work
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.units import format_bytes

COPIES = 4
"""Number of copies of a rank's state: two mirrors of its own, and two of a neighbour's."""

_MESSAGE_BYTES = 64 << 20
_FREE = 0.02
"""Share of a node's /dev/shm that mirrors leave to other users, such as MPI."""


class Mirror:
    """Mirrors of the states of all ranks in the memory of nodes. Creating one is collective.

    Args:
        world: The ranks.
        nodes: Node of each rank; at least two different ones.
        run: Folder of the run.
        entries: Ranges of this rank.
        state: Training state of about the size that later ones have.
        announce: Function that rank 0 calls with the token of this start before a folder is created.

    Attributes:
        newest: Step of the newest complete mirror; -1 for none.
        token: Token of this start of the run.

    Raises:
        HpctrainError: A node has too little memory. All ranks raise it.
    """

    def __init__(
        self,
        world: World,
        nodes: Sequence[int],
        run: Path,
        entries: Sequence[TensorRange],
        state: Mapping[str, Any],
        announce: Callable[[str], None],
    ) -> None:
        self.world, self.newest = world, -1
        self._group = world.new_group(("mirror",), tuple(range(world.size)), "mpi")
        self.token = self._group.broadcast_object(new_token())
        size = SlotContents.of(entries).slot_bytes(state if world.rank == 0 else {})
        self._sizes: list[int] = self._group.all_gather_object(size)
        self._to, self._from = neighbour_ranks(nodes, world.rank)
        _require_memory(world, 2 * sum(self._sizes[rank] for rank in (world.rank, *self._from)))
        with raise_on_all_ranks(self._group):
            if world.rank == 0:
                announce(self.token)
        with raise_on_all_ranks(self._group):
            self._folder, self._owner = create_mirror_folder(self.token, run, nodes[world.rank])
        with raise_on_all_ranks(self._group):
            self._slots = {
                rank: [MirrorSlot(part_path(self._folder, rank, n), self._sizes[rank]) for n in (0, 1)]
                for rank in (world.rank, *self._from)
            }
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self._generation = 0
        self._pending: _PendingMirror | None = None

    @property
    def bytes(self) -> int:
        """Memory in bytes that this rank uses for mirrors."""
        return sum(len(slot.memory) for slots in self._slots.values() for slot in slots)

    def begin(self, entries: Sequence[TensorRange], state: Mapping[str, Any], step: int, rounds: int) -> None:
        """Begin a mirror of the current state, after an older one is complete. Collective.

        Args:
            entries: Ranges of this rank.
            state: Training state.
            step: Number of steps that are done.
            rounds: Number of rounds in which ranks send the mirror to each other. Each call of `advance`
                starts one.
        """
        self.advance(wait=True)
        # All ranks have the former mirror completely, so the one before it may be overwritten.
        self._group.barrier()
        self._generation += 1
        number = self._generation % 2
        slots = {rank: slots[number] for rank, slots in self._slots.items()}
        for slot in slots.values():
            slot.invalidate()
        table = {
            "run": self.token,
            "generation": self._generation,
            "step": step,
            "rank": self.world.rank,
            "ranks": self.world.size,
            "host": self.world.hostname,
            "state": dict(state) if self.world.rank == 0 else None,
        }
        contents = SlotContents.of(entries)
        own = slots[self.world.rank]
        assert contents.end <= len(own.memory), (contents.end, len(own.memory))
        slot_copy = SlotCopy(contents, own.memory)

        def copy() -> Memory:
            slot_copy.run()
            return own.write_table(table, contents)

        self._pending = _PendingMirror(step, slots, slot_copy, self._threads.submit(copy), rounds)

    def protect(self, update: bool = True) -> None:
        """Copy what is not copied yet, so that the values may change; see `SlotCopy.protect`."""
        if self._pending is not None:
            self._pending.slot_copy.protect(update)

    def advance(self, wait: bool = False) -> None:
        """Finish a round of the mirror that is being written, and start the next one. Collective.

        Args:
            wait: True to finish all rounds.
        """
        while (pending := self._pending) is not None:
            if pending.header is None:
                with raise_on_all_ranks(self._group):
                    pending.header = pending.table_header.result()
            for work in pending.messages:
                work.wait()
            pending.messages = []
            if pending.round == pending.rounds:
                pending.mark_complete(self.world.rank)
                self.newest, self._pending = pending.step, None
            else:
                self._send(pending)
            if not wait:
                return

    def invalidate(self) -> None:
        """Invalidate all mirrors. The values may change afterwards. Collective."""
        self.advance(wait=True)
        for slot in (slot for slots in self._slots.values() for slot in slots):
            slot.invalidate()
        self.newest = -1
        self._group.barrier()

    def close(self) -> None:
        """Delete all mirrors, since the run has ended as planned. Collective."""
        self.advance(wait=True)
        self._threads.shutdown()
        self._group.barrier()
        self._slots.clear()
        self._owner.close()
        if self.world.local_rank == 0:
            remove_mirrors(self.token)
        self._group.barrier()

    def _send(self, pending: _PendingMirror) -> None:
        """Start the messages of the next round: a share of each file, and headers in the last round."""
        group, rank = self._group, self.world.rank
        pending.round += 1
        assert pending.header is not None
        for source in self._from:
            for part in _shares(pending.slots[source].memory, pending.round, pending.rounds):
                pending.messages.append(group.start_recv(part, source))
            if pending.round == pending.rounds:
                header = pending.headers[source] = np.zeros(HEADER_BYTES, np.uint8)
                pending.messages.append(group.start_recv(torch.from_numpy(header), source))
        for part in _shares(pending.slots[rank].memory, pending.round, pending.rounds):
            pending.messages.append(group.start_send(part, self._to))
        if pending.round == pending.rounds:
            pending.messages.append(group.start_send(torch.from_numpy(pending.header), self._to))


class _PendingMirror:
    """Mirror that is being written.

    Attributes:
        step: Its step.
        slots: Slots of this rank and of those that send to it, by rank.
        slot_copy: Copy of this rank's slices.
        table_header: Header of this rank's part, when the copy is done.
        rounds: Number of rounds.
        round: Number of rounds that have started.
        header: Header of this rank's part.
        headers: Headers of the parts of other ranks, by rank.
        messages: Messages of the current round.
    """

    def __init__(
        self,
        step: int,
        slots: Mapping[int, MirrorSlot],
        slot_copy: SlotCopy,
        table_header: Future[Memory],
        rounds: int,
    ) -> None:
        self.step, self.slots, self.rounds = step, slots, rounds
        self.slot_copy, self.table_header = slot_copy, table_header
        self.round = 0
        self.header: Memory | None = None
        self.headers: dict[int, Memory] = {}
        self.messages: list[Work[Any]] = []

    def mark_complete(self, rank: int) -> None:
        """Write the headers into the slots, which makes the parts valid."""
        assert self.header is not None
        for source, header in (self.headers | {rank: self.header}).items():
            self.slots[source].mark_complete(header)


def neighbour_ranks(nodes: Sequence[int], rank: int) -> tuple[int, list[int]]:
    """Return the rank to which a rank sends its part, and the ranks that send to it.

    A rank sends to the rank with the same number on the next node. If nodes have different numbers of ranks,
    several ranks may send to one, or none.

    Args:
        nodes: Node of each rank.
        rank: The rank.
    """
    of_node: dict[int, list[int]] = {}
    for each, node in enumerate(nodes):
        of_node.setdefault(node, []).append(each)
    order = sorted(of_node)
    assert len(order) > 1, nodes

    def target(sender: int) -> int:
        following = of_node[order[(order.index(nodes[sender]) + 1) % len(order)]]
        return following[of_node[nodes[sender]].index(sender) % len(following)]

    return target(rank), [each for each in range(len(nodes)) if target(each) == rank]


def _shares(memory: Memory, number: int, count: int) -> list[torch.Tensor]:
    """Return messages with share `number`, from 1 on, of `count` shares of a file without its header."""
    content = torch.from_numpy(memory)[HEADER_BYTES:]
    first, last = (len(content) * each // count for each in (number - 1, number))
    starts = range(first, last, _MESSAGE_BYTES)
    return [content[start : min(last, start + _MESSAGE_BYTES)] for start in starts]


def _require_memory(world: World, needed: int) -> None:
    """Check that the /dev/shm of each node has enough free memory. Collective.

    Raises:
        HpctrainError: A node has too little. All ranks raise it.
    """
    sizes = world.everyone.all_gather_object((world.node, needed))
    total = sum(size for node, size in sizes if node == world.node)
    with raise_on_all_ranks(world.everyone):
        space = os.statvfs(MEMORY)
        free = space.f_bavail * space.f_frsize
        if total > free - _FREE * space.f_blocks * space.f_frsize:
            raise HpctrainError(
                f"checkpoint.mirror = true: needs {format_bytes(total)} of {MEMORY} on {world.hostname}, "
                f"{COPIES} times what its ranks write into a checkpoint, but {format_bytes(free)} are free; "
                "enlarge it (mount -o remount,size=; in containers --shm-size), or use more nodes"
            )
