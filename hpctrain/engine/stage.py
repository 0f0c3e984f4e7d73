"""What a rank holds of a pipeline stage, built in one way for a run and, without memory, for a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpctrain.checkpoint.entries import model_entries
from hpctrain.checkpoint.read import load
from hpctrain.comm.group import Group
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.model.part import Part, blocks_of
from hpctrain.model.precision import Precision
from hpctrain.optim.optimizer import refresh
from hpctrain.parallel.groups import LayerGroups
from hpctrain.parallel.residency import Residency
from hpctrain.parallel.saved_policy import SavedPolicy
from hpctrain.sharding.bucket import Bucket, Store
from hpctrain.sharding.bucket_layout import bucket_layouts
from hpctrain.sharding.gather import make_residency
from hpctrain.sharding.outer import EveryStep, Outer
from hpctrain.sharding.reducer import make_reducer
from hpctrain.sharding.replication import Axes, Replications, Sharding
from hpctrain.sharding.synchronize import GradientSynchronizer

OUTERS: Mapping[str, Callable[[], Outer]] = {"every_step": EveryStep}
"""What makes each Outer, by its name."""


class StageMesh(Axes, Protocol):
    """What is asked of a mesh, or of a planned one."""

    def cut(self, group: Group, size: int) -> tuple[Group, Group]:
        """Of a group's parts of `size` neighbours this rank's, and its peers in all parts. Collective."""

    def nodes(self, group: Group) -> list[int]:
        """The node of every rank of a group. Collective."""


@dataclass
class Stage:
    """What this rank holds of a pipeline stage: its parts of the model by chunk, in buckets, and what gathers
    their parameters. Several, of one mesh or of several, live beside each other.
    """

    groups: LayerGroups
    models: list[Part]
    replications: Replications
    buckets: list[Bucket]
    residency: Residency


@dataclass
class TrainedStage(Stage):
    """A Stage with gradients, what sums them, and what keeps replicas together."""

    synchronizer: GradientSynchronizer
    outer: Outer


def make_groups(deck: Deck, mesh: Axes, saved_policy: SavedPolicy) -> LayerGroups:
    """The groups of the deck's layers."""
    return LayerGroups(
        tensor=mesh.group("tensor"),
        context=mesh.group("context"),
        sequence_parallel=deck.layout.sequence_parallel,
        context_form=deck.layout.context_form,
        saved_policy=saved_policy,
        product_format=Precision.of(deck).product,
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
    trained: bool = False,
) -> Stage:
    """Give the parts of a stage their memory. `store` makes that of slices, `trained` as in Bucket."""
    buckets = fill_parts(deck, models, replications, trained, store)
    blocks = [block.held[0] for model in models for block in blocks_of(model)]
    residency = make_residency(buckets, blocks, deck.memory.keep_gathered)
    for model in models:
        model.residency = residency
    return Stage(groups, list(models), replications, buckets, residency)


def build_trained_stage(
    deck: Deck,
    groups: LayerGroups,
    models: Sequence[Part],
    replications: Replications,
    store: Store | None = None,
) -> TrainedStage:
    """As `build_stage`, to be trained; what is to be frozen is frozen already."""
    stage = build_stage(deck, groups, models, replications, store, trained=True)
    each = deck.memory.accumulate == "sliced"
    reducers = [make_reducer(bucket) for bucket in stage.buckets]
    outer = OUTERS["every_step"]()
    return TrainedStage(**vars(stage), synchronizer=GradientSynchronizer(reducers, outer, each), outer=outer)


def load_parameters(path: Path, stage: Stage, everyone: Group) -> None:
    """Fill a stage that is not trained from a checkpoint. Collective; errors as in `checkpoint.read.load`."""
    load(path, everyone, model_entries(stage.buckets))
    refresh(stage.buckets)
