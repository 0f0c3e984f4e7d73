"""What ranks send each other: sums and pieces that all of them know, who receives others, and how fast."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from hpctrain.comm.error_messages import name_ranks
from hpctrain.comm.group import Group
from hpctrain.comm.mesh import choose_transport
from hpctrain.comm.world import World
from hpctrain.host.device import synchronize
from hpctrain.watch.stress.difference import difference
from hpctrain.watch.stress.record import Look, StressRank, StressRecord, TestTime
from hpctrain.watch.stress.words import key, random_words

TEST = "collectives"
INSIDE, BETWEEN, ALL = "inside the node", "between nodes", "all ranks"

SMALL = 256
"""Words of a piece; large ones follow, as operations go other ways by size."""

LARGE = 1 << 19
_GATHERED = 1 << 23  # words of all ranks' pieces, at most
_EXACT = 1 << 24  # sums up to here are exact in fp32
_OTHERS = 64  # what a rank adds to what all have is below


class Collectives:
    """The test, over groups of all ranks and of those of a node, by what runs use, and over pairs of nodes.

    Making one is collective. Of what is sent, each piece of words depends on who sends it to whom, and when.
    """

    def __init__(self, world: World, place: StressRank, large: int, look: Look) -> None:
        self.world, self.place, self.look = world, place, look
        transport = choose_transport(world, "auto")
        everyone = world.new_group(("stress",), tuple(range(world.size)), transport)
        nodes = world.everyone.all_gather_object(world.node)
        here = tuple(rank for rank in range(world.size) if nodes[rank] == world.node)
        node = world.new_group(("node",), here, transport)
        self._members = [
            [rank for rank in range(world.size) if nodes[rank] == each] for each in range(world.nodes)
        ]
        self._groups = [(INSIDE, node)] if world.nodes == 1 else [(INSIDE, node), (ALL, everyone)]
        self._everyone = everyone
        self._large = max(SMALL, min(large, _GATHERED // world.size))
        self._words = random_words(self._large).to(world.device)
        bound = max(1, (_EXACT - world.size * _OTHERS) // world.size)
        self._numbers = (self._words & ((1 << 30) - 1)).remainder(min(4096, bound)).float()
        self._time = 0

    def run(self, record: StressRecord, turn: TestTime, number: int) -> None:  # noqa: ARG002
        """Send and check until the turn is over, which all ranks agree on after each time. Collective."""
        moved: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        while True:
            for words in (SMALL, self._large):
                for name, group in self._groups:
                    if group.size > 1:
                        self._all_of(
                            group, words, record, moved[name] if words == self._large else [0.0, 0.0]
                        )
                self._between(words, record, moved[BETWEEN] if words == self._large else [0.0, 0.0])
            self._time += 1
            over = torch.tensor(turn.over, dtype=torch.int64)
            if self.world.everyone.all_reduce(over, "max").item():
                break
        record.rates |= {name: sent / seconds for name, (sent, seconds) in moved.items() if seconds}

    def _all_of(self, group: Group, words: int, record: StressRecord, moved: list[float]) -> None:
        """Every operation of a group, of pieces of so many words; adds bytes and seconds to `moved`."""
        size, rank, ranks = group.size, group.rank, group.ranks
        across = f"over {name_ranks(ranks)}"

        own = self._piece(ranks[rank], -1, words)
        gathered = self._timed(group, moved, (size - 1) * own.nbytes, lambda: group.all_gather(own))
        self._check_pieces("all_gather", across, group, gathered, to_all=True, record=record)

        pieces = torch.cat([self._piece(ranks[rank], other, words) for other in ranks])
        swapped = self._timed(group, moved, (size - 1) * own.nbytes, lambda: group.all_to_all(pieces))
        self._check_pieces("all_to_all", across, group, swapped, to_all=False, record=record)

        total = size * self._numbers[:words] + sum(_added(other, self._time) for other in ranks)
        mine = self._numbers[:words] + _added(ranks[rank], self._time)
        sent = 2 * (size - 1) * mine.nbytes / size
        summed = self._timed(group, moved, sent, lambda: group.all_reduce(mine))
        self._check_sum("all_reduce", across, summed, total, record)

        mine = (self._numbers[:words] + _added(ranks[rank], self._time)).repeat(size)
        sent = (size - 1) * mine.nbytes / size
        part = self._timed(group, moved, sent, lambda: group.reduce_scatter(mine))
        self._check_sum("reduce_scatter", across, part, total, record)

        received = torch.empty_like(own)
        after, before = (rank + 1) % size, (rank - 1) % size
        piece = self._piece(ranks[rank], ranks[after], words)
        ring = [lambda: group.send(piece, after), lambda: group.recv(received, before)]
        for step in ring if rank % 2 == 0 else reversed(ring):  # so that nobody waits for one who waits
            step()
        synchronize(self.world.device)
        self._check_piece("a message", ranks[before], ranks[rank], received, record)

    def _between(self, words: int, record: StressRecord, moved: list[float]) -> None:
        """Ranks of one place on two nodes send each other a piece; each node meets all others in turn."""
        nodes = self.world.nodes
        even = nodes + nodes % 2
        for meeting in range(even - 1 if nodes > 1 else 0):
            other = partner(self.world.node, meeting, even)
            group = self._everyone
            group.barrier()
            if other >= nodes or self.world.local_rank >= len(self._members[other]):
                continue
            peer = self._members[other][self.world.local_rank]
            received = torch.empty(words, dtype=torch.int64, device=self.world.device)
            piece = self._piece(self.world.rank, peer, words)
            began = perf_counter()
            if self.world.rank < peer:
                group.send(piece, peer)
                group.recv(received, peer)
            else:
                group.recv(received, peer)
                group.send(piece, peer)
            synchronize(self.world.device)
            moved[0] += 2 * piece.nbytes
            moved[1] += perf_counter() - began
            self._check_piece("a message", peer, self.world.rank, received, record)

    def _timed(self, group: Group, moved: list[float], sent: float, run: Callable[[], Tensor]) -> Tensor:
        group.barrier()
        synchronize(self.world.device)
        began = perf_counter()
        found = run()
        synchronize(self.world.device)
        moved[0] += sent
        moved[1] += perf_counter() - began
        return found

    def _piece(self, sender: int, receiver: int, words: int) -> Tensor:
        """What a rank sends to another one this time, or (-1) to all."""
        return self._words[:words] ^ key(sender, receiver + 1, self._time, words)

    def _check_pieces(
        self, operation: str, across: str, group: Group, found: Tensor, to_all: bool, record: StressRecord
    ) -> None:
        own = group.ranks[group.rank]
        self.look(operation, found)
        for sender, piece in zip(group.ranks, found.chunk(group.size), strict=True):
            expected = self._piece(sender, -1 if to_all else own, len(piece))
            self._compare(f"{operation} {across}", sender, piece, expected, record)

    def _check_piece(self, how: str, sender: int, receiver: int, found: Tensor, record: StressRecord) -> None:
        self.look("message", found)
        self._compare(how, sender, found, self._piece(sender, receiver, len(found)), record)

    def _compare(self, how: str, sender: int, found: Tensor, expected: Tensor, record: StressRecord) -> None:
        apart = difference(found, expected)
        if apart is not None:
            told = f"received word {apart.position} of {len(found)} from {self.place.of(sender)} by {how} as"
            here = self.place.hosts[self.place.rank]
            there = self.place.hosts[sender]
            hosts = here if here == there else f"{here},{there}"
            record.add_wrong(TEST, f"{self.place.name} {told} {apart}", hosts)

    def _check_sum(
        self, operation: str, across: str, found: Tensor, expected: Tensor, record: StressRecord
    ) -> None:
        self.look(operation, found)
        apart = difference(found, expected)
        if apart is not None:
            told = f"{self.place.name}: element {apart.position} of {operation} {across} is {apart}"
            record.add_wrong(TEST, f"{told}; a sum does not show which rank was wrong", "")


def partner(node: int, meeting: int, nodes: int) -> int:
    """Whom a node meets, of an even number of them that all meet each other in `nodes` - 1 meetings."""
    last = nodes - 1
    if node == last:
        return meeting
    if node == meeting:
        return last
    return (2 * meeting - node) % last


def _added(rank: int, time: int) -> int:
    return (rank + time) % _OTHERS
