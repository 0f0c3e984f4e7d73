"""Nodes of the ranks: those of the machine, or smaller ones that are emulated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


class Topology:
    """Node of each rank of the world. Nodes are numbered by their lowest rank.

    Args:
        machine: Node of each rank in the machine.

    Attributes:
        machine_nodes: Node of each rank in the machine.
        nodes: Node of each rank as groups and memory use it.
        emulated_ranks_per_node: Number of ranks of an emulated node; None if nodes are not emulated.
    """

    def __init__(self, machine: Sequence[int]) -> None:
        self.machine_nodes = self.nodes = tuple(machine)
        self.emulated_ranks_per_node: int | None = None

    def emulate(self, ranks_per_node: int | None) -> None:
        """Divide each node of the machine into nodes of so many ranks, by setting `nodes` of this object.

        Local. Groups and memory that exist do not change. All ranks pass the same number.

        Args:
            ranks_per_node: Number of ranks of an emulated node; the last one of a node of the machine may
                have fewer. None ends the emulation.
        """
        self.emulated_ranks_per_node = ranks_per_node
        if ranks_per_node is None:
            self.nodes = self.machine_nodes
            return
        ranks_before: defaultdict[int, int] = defaultdict(int)
        numbers: dict[tuple[int, int], int] = {}
        nodes = []
        for node in self.machine_nodes:
            block = node, ranks_before[node] // ranks_per_node
            ranks_before[node] += 1
            nodes.append(numbers.setdefault(block, len(numbers)))
        self.nodes = tuple(nodes)

    @property
    def ranks_per_node(self) -> int:
        """Ranks per node: the number that is emulated, otherwise the mean over the nodes, rounded down."""
        return self.emulated_ranks_per_node or max(1, len(self.nodes) // len(set(self.nodes)))


def ranks_per_node_of(nodes: Sequence[int]) -> int:
    """Return the number of ranks per node of a group; 0 if nodes have unequal numbers or mixed ranks.

    Each node must have equally many ranks of the group, and these must be consecutive.

    Args:
        nodes: Node of each rank of the group.
    """
    size = nodes.count(nodes[0])
    is_even = len(nodes) % size == 0 and all(
        node == nodes[rank // size * size] for rank, node in enumerate(nodes)
    )
    return size if is_even and len(set(nodes)) * size == len(nodes) else 0
