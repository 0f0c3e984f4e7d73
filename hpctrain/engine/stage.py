"""What a rank of a pipeline stage trains, built in one way for a run and, without memory, for a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hpctrain.comm.group import Group
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.memory.recompute import Recompute
from hpctrain.model.part import Part, blocks_of
from hpctrain.model.precision import Precision
from hpctrain.parallel.groups import LayerGroups
from hpctrain.parallel.residency import Residency
from hpctrain.sharding.bucket import Bucket, Store, bucket_layouts
from hpctrain.sharding.gather import make_residency
from hpctrain.sharding.outer import EveryStep
from hpctrain.sharding.reducer import make_reducer
from hpctrain.sharding.replication import Axes, Replications, Sharding
from hpctrain.sharding.synchronize import GradientSynchronizer


class StageMesh(Axes, Protocol):
    """What is asked of a mesh, or of a planned one."""

    def cut(self, group: Group, size: int) -> tuple[Group, Group]:
        """Of a group's parts of `size` neighbours this rank's, and its peers in all parts. Collective."""

    def nodes(self, group: Group) -> list[int]:
        """The node of every rank of a group. Collective."""


@dataclass
class Stage:
    """What this rank holds of a pipeline stage: its parts of the model by chunk, in buckets, with what sums
    their gradients and what gathers their parameters.
    """

    groups: LayerGroups
    models: list[Part]
    replications: Replications
    buckets: list[Bucket]
    synchronizer: GradientSynchronizer
    residency: Residency


def make_groups(deck: Deck, mesh: Axes, recompute: Recompute) -> LayerGroups:
    """The groups of the deck's layers."""
    return LayerGroups(
        tensor=mesh.group("tensor"),
        context=mesh.group("context"),
        sequence_parallel=deck.layout.sequence_parallel,
        context_form=deck.layout.context_form,
        saved_policy=recompute,
    )


def make_replications(deck: Deck, mesh: StageMesh) -> Replications:
    """Who holds which pieces, by the deck's ZeRO."""

    def shard(everyone: Group) -> Sharding:
        size = zero_group_size(deck, mesh, everyone)
        if size == everyone.size:
            return Sharding(deck.layout.zero, everyone, mesh.part("data", 1))
        return Sharding(deck.layout.zero, *mesh.cut(everyone, size))

    return Replications(mesh, shard)


def zero_group_size(deck: Deck, mesh: StageMesh, everyone: Group) -> int:
    """Over how many of `everyone`, who train on other tokens, ZeRO cuts. Collective.

    HpctrainError on all of them where `layout.zero_group = "node"` and their nodes do not have as many each.
    """
    wish = deck.layout.zero_group
    if deck.layout.zero == 0 or wish is None:
        return everyone.size
    if wish != "node":
        assert everyone.size % wish == 0, (wish, everyone.size)
        return wish
    nodes = mesh.nodes(everyone)
    size = nodes.count(nodes[0])
    if nodes != [nodes[rank // size * size] for rank in range(len(nodes))] or len(nodes) % size:
        sentence = "needs as many data x context ranks on every node"
        raise HpctrainError(deck.problem("layout.zero_group", sentence))
    return size


def fill_parts(
    deck: Deck,
    models: Sequence[Part],
    replications: Replications,
    trained: bool = True,
    store: Store | None = None,
) -> list[Bucket]:
    """Give parts of a model their memory, in buckets. Arguments as in Bucket."""
    size, own = deck.communication.bucket_bytes, Precision.of(deck)
    layouts = (layout for model in models for layout in bucket_layouts(model.units(), replications, size))
    return [Bucket(layout, own.storage, own.gradient, trained, store) for layout in layouts]


def build_stage(
    deck: Deck,
    groups: LayerGroups,
    models: Sequence[Part],
    replications: Replications,
    store: Store | None = None,
) -> Stage:
    """Give the parts of a stage, frozen where they are to be, their memory; `store` makes that of slices."""
    buckets = fill_parts(deck, models, replications, store=store)
    blocks = [block.held[0] for model in models for block in blocks_of(model)]
    residency = make_residency(buckets, blocks, deck.memory.keep_gathered)
    for model in models:
        model.residency = residency
    each = deck.memory.accumulate == "sliced"
    synchronizer = GradientSynchronizer([make_reducer(bucket) for bucket in buckets], EveryStep(), each)
    return Stage(groups, list(models), replications, buckets, synchronizer, residency)
