"""Which ranks share a node: as MPI tells of the machine, or in blocks of its nodes, to try things out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


class Topology:
    """The node of every rank of the world, by numbers in the order of the nodes' lowest ranks.

    `machine` are those that there are, `nodes` those that groups go by; `per_node` are the ranks of an
    emulated one, None where none is emulated.
    """

    def __init__(self, machine: Sequence[int]) -> None:
        self.machine = self.nodes = tuple(machine)
        self.per_node: int | None = None

    def emulate(self, per_node: int | None) -> None:
        """Cut every node of the machine into nodes of so many ranks, the last of what is left; None: leave
        them whole.
        """
        self.per_node = per_node
        if per_node is None:
            self.nodes = self.machine
            return
        seen: defaultdict[int, int] = defaultdict(int)
        blocks: dict[tuple[int, int], int] = {}
        nodes = []
        for node in self.machine:
            block = node, seen[node] // per_node
            seen[node] += 1
            nodes.append(blocks.setdefault(block, len(blocks)))
        self.nodes = tuple(nodes)

    @property
    def ranks_per_node(self) -> int:
        """Of the nodes that groups go by."""
        return self.per_node or max(1, len(self.nodes) // len(set(self.nodes)))


def ranks_per_node_of(nodes: Sequence[int]) -> int:
    """How many ranks of a group share a node, by the nodes of all its ranks; 0 where these are not as many on
    each, or not side by side.
    """
    size = nodes.count(nodes[0])
    even = len(nodes) % size == 0 and all(
        node == nodes[rank // size * size] for rank, node in enumerate(nodes)
    )
    return size if even and len(set(nodes)) * size == len(nodes) else 0
