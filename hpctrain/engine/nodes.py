"""How groups are cut by node: for ZeRO inside nodes, and for sums that are compressed between them alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hpctrain.comm.group import Group
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.host.topology import ranks_per_node_of
from hpctrain.sharding.replication import OTHER_TOKENS, MeshQueries, NodePeers


class NodeMesh(MeshQueries, Protocol):
    """What is asked of a mesh, or of a planned one."""

    def split_group(self, group: Group, size: int, across: str = "replicas") -> tuple[Group, Group]:
        """Of a group's parts of `size` neighbours this rank's, and its peers in all parts, along an axis of
        that name. Collective.
        """

    def nodes(self, group: Group) -> list[int]:
        """The node of every rank of a group. Collective."""


def ranks_of_node(mesh: NodeMesh, group: Group) -> int:
    """How many neighbours of a group share a node; 0 where these are not as many on each. Collective."""
    return ranks_per_node_of(mesh.nodes(group))


def cut_by_node(deck: Deck, mesh: NodeMesh) -> Callable[[Group], NodePeers | None]:
    """What makes the NodePeers of ranks that train on other tokens, where `between = "nodes"`
    asks for them. Collective, as is what it makes.

    HpctrainError on all ranks where nodes do not have as many ranks of each such group: tied embeddings, and
    what tensor ranks have in common, are to become the same by every one of them.
    """
    if not deck.communication.compresses_between_nodes:
        return lambda _: None
    dense = mesh.group(*OTHER_TOKENS)
    groups = [dense, mesh.group("expert_data")] if deck.model.experts else [dense]
    sizes = [ranks_of_node(mesh, group) for group in groups]
    for axes in (OTHER_TOKENS, ("tensor",), ("pipeline",)):
        told = zip(*mesh.group(*axes).all_gather_object(sizes), strict=True)
        sizes = [each[0] if len(set(each)) == 1 else 0 for each in told]
    for group, size in zip(groups, sizes, strict=True):
        if not size:
            sentence = f"requires the same number of {group.name.replace('_', ' ')} ranks on every node"
            raise HpctrainError(
                deck.problem(f"communication.{deck.communication.compress}.between", sentence)
            )
    size_of = dict(zip(groups, sizes, strict=True))
    return lambda group: NodePeers(*mesh.split_group(group, size_of[group], "nodes"))
