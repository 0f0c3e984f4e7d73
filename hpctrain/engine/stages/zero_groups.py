"""Ranks that hold each shard: groups of ZeRO, inside nodes or across them, and of replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hpctrain.comm.group import Group
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.local_steps import has_outer_model
from hpctrain.engine.stages.gradients import ReplicaSyncChoice
from hpctrain.errors import HpctrainError
from hpctrain.host.topology import ranks_per_node_of
from hpctrain.sharding.replication import OTHER_TOKENS, MeshQueries, NodePeers, Replications, ZeroSharding


class NodeMesh(MeshQueries, Protocol):
    """Interface of a mesh or a planned mesh that knows the nodes of its ranks."""

    def split_group(self, group: Group, size: int, across: str = "replicas") -> tuple[Group, Group]:
        """Split a group into parts of `size` consecutive ranks. Collective over the group.

        Returns:
            The part of this rank, and the ranks with the same number in all parts. The latter group is named
            `across`.
        """

    def nodes(self, group: Group) -> list[int]:
        """Return the node of each rank of a group. Collective over the group."""


def make_replications(deck: Deck, mesh: NodeMesh) -> Replications:
    """Return which ranks hold each shard, with the deck's ZeRO stage and groups. Collective."""
    dense, make_peers = mesh.group("data", "context"), node_peers_factory(deck, mesh)
    diverging = ReplicaSyncChoice.of(deck).diverging

    def make_sharding(data_group: Group) -> ZeroSharding:
        has_outer = has_outer_model(deck)
        size = (
            data_group.size // deck.layout.replicas if has_outer else zero_group_size(deck, mesh, data_group)
        )
        # Experts that no other rank of the group holds are neither sharded nor gathered.
        is_unsharded = size == 1 and data_group is not dense and deck.memory.parameters == "device"
        if has_outer:
            return ZeroSharding(
                0 if is_unsharded else deck.layout.zero,
                *mesh.split_group(data_group, size),
                diverging,
                make_peers(data_group),
            )
        if is_unsharded:
            return ZeroSharding(0, data_group, mesh.new_subgroup("data", 1))
        if size == data_group.size:
            return ZeroSharding(
                deck.layout.zero, data_group, mesh.new_subgroup("data", 1), nodes=make_peers(data_group)
            )
        return ZeroSharding(deck.layout.zero, *mesh.split_group(data_group, size), diverging)

    return Replications(mesh, make_sharding)


def zero_group_size(deck: Deck, mesh: NodeMesh, data_group: Group) -> int:
    """Return the number of ranks over which ZeRO shards. Collective over `data_group`.

    Args:
        deck: The deck.
        mesh: Arrangement of the ranks.
        data_group: All ranks that hold the same parameters and train on different tokens.

    Raises:
        HpctrainError: On all ranks if `layout.zero_group = "node"` and nodes have different numbers of ranks
            of `data_group`.
    """
    requested = deck.layout.zero_group
    if deck.layout.zero == 0 or requested is None:
        return data_group.size
    if requested != "node":
        assert data_group.size % requested == 0, (requested, data_group.size)
        return requested
    size = ranks_of_node(mesh, data_group)
    if not size:
        among = data_group.name.replace("_", " ")
        sentence = f"requires the same number of {among} ranks on every node"
        raise HpctrainError(deck.problem("layout.zero_group", sentence))
    return size


def ranks_of_node(mesh: NodeMesh, group: Group) -> int:
    """Return how many consecutive ranks of a group are on each node; 0 if nodes differ. Collective."""
    return ranks_per_node_of(mesh.nodes(group))


def node_peers_factory(deck: Deck, mesh: NodeMesh) -> Callable[[Group], NodePeers | None]:
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
