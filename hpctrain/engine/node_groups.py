"""Division of groups by node, for ZeRO inside nodes and for compression between nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hpctrain.comm.group import Group
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.host.topology import ranks_per_node_of
from hpctrain.sharding.replication import OTHER_TOKENS, MeshQueries, NodePeers


class NodeMesh(MeshQueries, Protocol):
    """Interface of a mesh or a planned mesh that knows the nodes of its ranks."""

    def split_group(self, group: Group, size: int, across: str = "replicas") -> tuple[Group, Group]:
        """Split a group into parts of `size` neighbouring ranks. Collective over the group.

        Returns:
            The part of this rank, and the ranks with the same number in all parts. The latter group is named
            `across`.
        """

    def nodes(self, group: Group) -> list[int]:
        """Return the node of each rank of a group. Collective over the group."""


def ranks_of_node(mesh: NodeMesh, group: Group) -> int:
    """Return how many neighbouring ranks of a group share a node; 0 if nodes differ. Collective."""
    return ranks_per_node_of(mesh.nodes(group))


def cut_by_node(deck: Deck, mesh: NodeMesh) -> Callable[[Group], NodePeers | None]:
    """Return a function that makes the NodePeers of a group, for `between = "nodes"`. Collective.

    The function is collective over the group. It returns None if the deck does not compress between nodes.

    Raises:
        HpctrainError: On all ranks if nodes have different numbers of ranks of a group. Then tensor ranks and
            tied embeddings would not get the same sums.
    """
    if not deck.communication.compresses_between_nodes:
        return lambda _: None
    dense = mesh.group(*OTHER_TOKENS)
    groups = [dense, mesh.group("expert_data")] if deck.model.experts else [dense]
    sizes = [ranks_of_node(mesh, group) for group in groups]
    for axes in (OTHER_TOKENS, ("tensor",), ("pipeline",)):
        of_ranks = zip(*mesh.group(*axes).all_gather_object(sizes), strict=True)
        sizes = [each[0] if len(set(each)) == 1 else 0 for each in of_ranks]
    for group, size in zip(groups, sizes, strict=True):
        if not size:
            sentence = f"requires the same number of {group.name.replace('_', ' ')} ranks on every node"
            raise HpctrainError(
                deck.problem(f"communication.{deck.communication.compress}.between", sentence)
            )
    size_of = dict(zip(groups, sizes, strict=True))
    return lambda group: NodePeers(*mesh.split_group(group, size_of[group], "nodes"))
