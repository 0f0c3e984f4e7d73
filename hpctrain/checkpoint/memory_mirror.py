"""Mirrors: every so often a copy of what each rank would write into a checkpoint, in the memory of its node
and of a neighbour node.

A mirror is made while training goes on. A thread copies this rank's slices into a file of its node's memory;
an update, which would change them, copies what is left first. In the steps that follow the ranks send the
files to each other, a part of them after each step, as messages that are under way while the next step is
made. All begin and go on after the same steps. There is room for two mirrors, the newest complete one and the
one that is being made, which counts when all ranks have all of it.
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
from hpctrain.checkpoint.mirror_folder import MEMORY, new_token, part_path, remove_mirrors, take_mirror_folder
from hpctrain.checkpoint.mirror_slot import HEADER_BYTES, Memory, MirrorSlot, SlotContents, SlotCopy
from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.comm.work import Work
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from hpctrain.units import format_bytes

COPIES = 4
"""How many times a rank has in memory what it writes: two mirrors of its own, and two of a neighbour's."""

_MESSAGE_BYTES = 64 << 20
_FREE = 0.02  # of a node's /dev/shm that mirrors leave to others, such as MPI


class Mirror:
    """What the ranks of a world keep of their state in each other's memory."""

    def __init__(
        self,
        world: World,
        nodes: Sequence[int],
        run: Path,
        entries: Sequence[TensorRange],
        told: Mapping[str, Any],
        announce: Callable[[str], None],
    ) -> None:
        """`nodes` are those of all ranks, two or more, `run` is the run's folder, `told` what will be told of
        the run, about. `announce` is called on rank 0 with this start's token before anything is made.

        Collective. HpctrainError on all ranks where a node has no room.
        """
        self.world, self.newest = world, -1
        self._group = world.new_group(("mirror",), tuple(range(world.size)), "mpi")
        self.token = self._group.broadcast_object(new_token())
        mine = SlotContents.of(entries).room(told if world.rank == 0 else {})
        self._sizes: list[int] = self._group.all_gather_object(mine)
        self._to, self._from = neighbour_ranks(nodes, world.rank)
        _require_memory(world, 2 * sum(self._sizes[rank] for rank in (world.rank, *self._from)))
        with raise_on_all_ranks(self._group):
            if world.rank == 0:
                announce(self.token)
        with raise_on_all_ranks(self._group):
            self._folder, self._owner = take_mirror_folder(self.token, run, nodes[world.rank])
        with raise_on_all_ranks(self._group):
            self._slots = {
                rank: [MirrorSlot(part_path(self._folder, rank, n), self._sizes[rank]) for n in (0, 1)]
                for rank in (world.rank, *self._from)
            }
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self._generation = 0
        self._making: _MirrorWrite | None = None

    @property
    def bytes(self) -> int:
        """Memory of the node that this rank has for mirrors."""
        return sum(len(slot.memory) for slots in self._slots.values() for slot in slots)

    def begin(self, entries: Sequence[TensorRange], state: Mapping[str, Any], step: int, rounds: int) -> None:
        """Begin a mirror of the present state, which ranks send each other after the next steps but one, of
        which there are so many. What another one still lacks comes first. Collective.
        """
        self.advance(wait=True)
        # From here on all ranks have all of the former one, so that the one before may be written over.
        self._group.barrier()
        self._generation += 1
        number = self._generation % 2
        slots = {rank: slots[number] for rank, slots in self._slots.items()}
        for slot in slots.values():
            slot.empty()
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
        copying = SlotCopy(contents, own.memory)

        def copy() -> Memory:
            copying.run()
            return own.fill(table, contents)

        self._making = _MirrorWrite(step, slots, copying, self._threads.submit(copy), rounds)

    def protect(self, update: bool = True) -> None:
        """After this the values may be overwritten, see SlotCopy."""
        if self._making is not None:
            self._making.copying.protect(update)

    def advance(self, wait: bool = False) -> None:
        """Send and receive the next part of the mirror that is being made, with `wait` all of it; on all
        ranks after the same step.
        """
        while (making := self._making) is not None:
            if making.header is None:
                with raise_on_all_ranks(self._group):
                    making.header = making.copied.result()
            for work in making.messages:
                work.wait()
            making.messages = []
            if making.round == making.rounds:
                making.count(self.world.rank)
                self.newest, self._making = making.step, None
            else:
                self._send(making)
            if not wait:
                return

    def invalidate(self) -> None:
        """No mirror that was begun so far counts; after this the values may be overwritten. Collective."""
        self.advance(wait=True)
        for slot in (slot for slots in self._slots.values() for slot in slots):
            slot.empty()
        self.newest = -1
        self._group.barrier()

    def close(self) -> None:
        """The run has ended in good order: nothing of it stays in memory. Collective."""
        self.advance(wait=True)
        self._threads.shutdown()
        self._group.barrier()
        self._slots.clear()
        self._owner.close()
        if self.world.local_rank == 0:
            remove_mirrors(self.token)
        self._group.barrier()

    def _send(self, making: _MirrorWrite) -> None:
        """Start the messages of the next round: a like share of each file; in the last one headers, too."""
        group, rank = self._group, self.world.rank
        making.round += 1
        assert making.header is not None
        for source in self._from:
            for part in _shares(making.slots[source].memory, making.round, making.rounds):
                making.messages.append(group.start_recv(part, source))
            if making.round == making.rounds:
                header = making.headers[source] = np.zeros(HEADER_BYTES, np.uint8)
                making.messages.append(group.start_recv(torch.from_numpy(header), source))
        for part in _shares(making.slots[rank].memory, making.round, making.rounds):
            making.messages.append(group.start_send(part, self._to))
        if making.round == making.rounds:
            making.messages.append(group.start_send(torch.from_numpy(making.header), self._to))


class _MirrorWrite:
    """The mirror that is being made: its slots by rank, and how far it is."""

    def __init__(
        self,
        step: int,
        slots: Mapping[int, MirrorSlot],
        copying: SlotCopy,
        copied: Future[Memory],
        rounds: int,
    ) -> None:
        self.step, self.slots, self.copying, self.copied, self.rounds = step, slots, copying, copied, rounds
        self.round = 0
        self.header: Memory | None = None
        self.headers: dict[int, Memory] = {}
        self.messages: list[Work[Any]] = []

    def count(self, rank: int) -> None:
        """All of it is here: what lies in this rank's slots counts."""
        assert self.header is not None
        for source, header in (self.headers | {rank: self.header}).items():
            self.slots[source].count(header)


def neighbour_ranks(nodes: Sequence[int], rank: int) -> tuple[int, list[int]]:
    """To whom a rank sends what it holds, and who sends to it, by the nodes of all ranks: those of the same
    place on the next node and on the one before; of a smaller node several send to one, or none does.
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
    """Share `number`, from 1 on, of `count` of a file behind its header, in messages."""
    whole = torch.from_numpy(memory)[HEADER_BYTES:]
    first, last = (len(whole) * each // count for each in (number - 1, number))
    return [whole[begin : min(last, begin + _MESSAGE_BYTES)] for begin in range(first, last, _MESSAGE_BYTES)]


def _require_memory(world: World, needed: int) -> None:
    """HpctrainError on all ranks where those of a node need more of its /dev/shm than is free. Collective."""
    here = world.everyone.all_gather_object((world.node, needed))
    total = sum(size for node, size in here if node == world.node)
    with raise_on_all_ranks(world.everyone):
        space = os.statvfs(MEMORY)
        free = space.f_bavail * space.f_frsize
        if total > free - _FREE * space.f_blocks * space.f_frsize:
            raise HpctrainError(
                f"checkpoint.mirror = true: needs {format_bytes(total)} of {MEMORY} on {world.hostname}, "
                f"{COPIES} times what its ranks write into a checkpoint, but {format_bytes(free)} are free; "
                "enlarge it (mount -o remount,size=; in containers --shm-size), or use more nodes"
            )
