"""Test of messages: ranks exchange pieces and sums that all ranks know, and compare and time them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from hpctrain.comm.error_messages import name_ranks
from hpctrain.comm.group import Group
from hpctrain.comm.mesh import choose_transport
from hpctrain.comm.world import World
from hpctrain.host.device import synchronize
from hpctrain.watch.stress.difference import difference
from hpctrain.watch.stress.random_words import key, random_words
from hpctrain.watch.stress.record import ResultHook, StressRank, StressRecord, TestTime

TEST = "collectives"
INSIDE, BETWEEN, ALL = "inside the node", "between nodes", "all ranks"

SMALL = 256
"""Words of a small piece. Large ones follow, since transports use other algorithms for them."""

LARGE = 1 << 19
_GATHERED = 1 << 23
"""Largest number of words of all ranks' pieces."""

_EXACT = 1 << 24  # sums up to here are exact in fp32
_OTHERS = 64
"""Bound of the numbers by which the summands of ranks differ."""


@dataclass
class _TransferTotal:
    """Bytes that this rank has sent in some operations, and their seconds."""

    bytes: float = 0.0
    seconds: float = 0.0


class Collectives:
    """Test of messages in the group of all ranks, in that of a node, and between pairs of nodes.

    It uses the transport that runs use. Each piece depends on its sender, its receiver, and the time, so that
    a piece that arrives at the wrong place is detected. Construction is collective.

    Args:
        world: The ranks.
        this_rank: This rank.
        large: Words of a large piece.
        on_result: Function that is called with each result before it is compared.
    """

    def __init__(self, world: World, this_rank: StressRank, large: int, on_result: ResultHook) -> None:
        self.world, self.this_rank, self.on_result = world, this_rank, on_result
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

    def run(self, record: StressRecord, test_time: TestTime, number: int) -> None:  # noqa: ARG002
        """Exchange and compare messages until the time of all ranks is over. Collective."""
        totals: defaultdict[str, _TransferTotal] = defaultdict(_TransferTotal)
        while True:
            for words in (SMALL, self._large):
                for name, group in self._groups:
                    if group.size > 1:
                        # Only large pieces count in the rates.
                        total = totals[name] if words == self._large else _TransferTotal()
                        self._test_group(group, words, record, total)
                total = totals[BETWEEN] if words == self._large else _TransferTotal()
                self._test_nodes(words, record, total)
            self._time += 1
            over = torch.tensor(test_time.over, dtype=torch.int64)
            if self.world.everyone.all_reduce(over, "max").item():
                break
        record.rates |= {name: each.bytes / each.seconds for name, each in totals.items() if each.seconds}

    def _test_group(self, group: Group, words: int, record: StressRecord, transfers: _TransferTotal) -> None:
        """Test all operations of a group.

        Args:
            group: The group.
            words: Words of each piece.
            record: Record to which wrong results are added.
            transfers: Total to which bytes and seconds of the operations are added.
        """
        size, rank, ranks = group.size, group.rank, group.ranks
        across = f"over {name_ranks(ranks)}"

        local_piece = self._piece(ranks[rank], -1, words)
        gathered = self._timed(
            group, transfers, (size - 1) * local_piece.nbytes, lambda: group.all_gather(local_piece)
        )
        self._check_pieces("all_gather", across, group, gathered, to_all=True, record=record)

        pieces = torch.cat([self._piece(ranks[rank], other, words) for other in ranks])
        swapped = self._timed(
            group, transfers, (size - 1) * local_piece.nbytes, lambda: group.all_to_all(pieces)
        )
        self._check_pieces("all_to_all", across, group, swapped, to_all=False, record=record)

        total = size * self._numbers[:words] + sum(_added(other, self._time) for other in ranks)
        summand = self._numbers[:words] + _added(ranks[rank], self._time)
        sent = 2 * (size - 1) * summand.nbytes / size
        summed = self._timed(group, transfers, sent, lambda: group.all_reduce(summand))
        self._check_sum("all_reduce", across, summed, total, record)

        summand = (self._numbers[:words] + _added(ranks[rank], self._time)).repeat(size)
        sent = (size - 1) * summand.nbytes / size
        part = self._timed(group, transfers, sent, lambda: group.reduce_scatter(summand))
        self._check_sum("reduce_scatter", across, part, total, record)

        received = torch.empty_like(local_piece)
        after, before = (rank + 1) % size, (rank - 1) % size
        piece = self._piece(ranks[rank], ranks[after], words)
        ring = [lambda: group.send(piece, after), lambda: group.recv(received, before)]
        for step in ring if rank % 2 == 0 else reversed(ring):  # so that no two ranks wait for each other
            step()
        synchronize(self.world.device)
        self._check_piece("a message", ranks[before], ranks[rank], received, record)

    def _test_nodes(self, words: int, record: StressRecord, transfers: _TransferTotal) -> None:
        """Exchange a piece with the rank of the same local number on each other node, one by one."""
        nodes = self.world.nodes
        even = nodes + nodes % 2
        for round_number in range(even - 1 if nodes > 1 else 0):
            other = partner(self.world.node, round_number, even)
            group = self._everyone
            group.barrier()
            if other >= nodes or self.world.local_rank >= len(self._members[other]):
                continue
            peer = self._members[other][self.world.local_rank]
            received = torch.empty(words, dtype=torch.int64, device=self.world.device)
            piece = self._piece(self.world.rank, peer, words)
            start = perf_counter()
            if self.world.rank < peer:
                group.send(piece, peer)
                group.recv(received, peer)
            else:
                group.recv(received, peer)
                group.send(piece, peer)
            synchronize(self.world.device)
            transfers.bytes += 2 * piece.nbytes
            transfers.seconds += perf_counter() - start
            self._check_piece("a message", peer, self.world.rank, received, record)

    def _timed(
        self, group: Group, transfers: _TransferTotal, sent: float, run: Callable[[], Tensor]
    ) -> Tensor:
        group.barrier()
        synchronize(self.world.device)
        start = perf_counter()
        actual = run()
        synchronize(self.world.device)
        transfers.bytes += sent
        transfers.seconds += perf_counter() - start
        return actual

    def _piece(self, sender: int, receiver: int, words: int) -> Tensor:
        """Return the piece that a rank sends to another one now; with receiver -1 to all ranks."""
        return self._words[:words] ^ key(sender, receiver + 1, self._time, words)

    def _check_pieces(
        self, operation: str, across: str, group: Group, actual: Tensor, to_all: bool, record: StressRecord
    ) -> None:
        receiver = group.ranks[group.rank]
        self.on_result(operation, actual)
        for sender, piece in zip(group.ranks, actual.chunk(group.size), strict=True):
            expected = self._piece(sender, -1 if to_all else receiver, len(piece))
            self._compare(f"{operation} {across}", sender, piece, expected, record)

    def _check_piece(
        self, how: str, sender: int, receiver: int, actual: Tensor, record: StressRecord
    ) -> None:
        self.on_result("message", actual)
        self._compare(how, sender, actual, self._piece(sender, receiver, len(actual)), record)

    def _compare(self, how: str, sender: int, actual: Tensor, expected: Tensor, record: StressRecord) -> None:
        wrong_bits = difference(actual, expected)
        if wrong_bits is not None:
            source = f"from {self.this_rank.of(sender)} by {how}"
            text = f"received word {wrong_bits.position} of {len(actual)} {source} as"
            here = self.this_rank.hosts[self.this_rank.rank]
            there = self.this_rank.hosts[sender]
            hosts = here if here == there else f"{here},{there}"
            record.add_wrong(TEST, f"{self.this_rank.name} {text} {wrong_bits}", hosts)

    def _check_sum(
        self, operation: str, across: str, actual: Tensor, expected: Tensor, record: StressRecord
    ) -> None:
        self.on_result(operation, actual)
        wrong_bits = difference(actual, expected)
        if wrong_bits is not None:
            element = f"element {wrong_bits.position} of {operation} {across}"
            text = f"{self.this_rank.name}: {element} is {wrong_bits}"
            record.add_wrong(TEST, f"{text}; a sum does not show which rank was wrong", "")


def partner(node: int, round_number: int, nodes: int) -> int:
    """Return the partner of a node in a round of a schedule in which all pairs of nodes meet.

    Args:
        node: Number of the node.
        round_number: Number of the round, below `nodes` - 1.
        nodes: Number of nodes, which must be even.
    """
    last = nodes - 1
    if node == last:
        return round_number
    if node == round_number:
        return last
    return (2 * round_number - node) % last


def _added(rank: int, time: int) -> int:
    return (rank + time) % _OTHERS
