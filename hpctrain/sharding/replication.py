"""Ranks that hold the same piece of a tensor, and the group over which its gradient is reduced.

A rank's piece of a tensor is described by a Shard. Pieces are the same on all ranks along the axes that do
not split the tensor:

- The data and context axes. These ranks train on different tokens, so gradients are summed over them. ZeRO
  splits the piece further: a ZeroSharding has a `group` whose ranks own one slice each. In hybrid sharding
  the group is a part of these ranks, for example one node, and `replicas` are the ranks of all parts with the
  same slice.
- The tensor axis. These ranks compute on the same tokens. Their gradients are equal, or partial (for example
  of norms under sequence parallelism) and summed over the axis.
- The pipeline axis, for the table of the embedding if the last layer uses it too, because embeddings are tied
  or for multi-token prediction: the first and the last stage hold it.

Example: data parallelism over 8 ranks on 2 nodes with groups of 4. Rank 5 owns slice 1 of 4 in the group of
the ranks 4 to 7, and its replicas are the ranks 1 and 5. Gradients are reduced over the group to slice
owners, then each slice is summed over its replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from hpctrain.comm.group import Group
from hpctrain.host.streams import SideStream
from hpctrain.parallel.shards import Shard
from hpctrain.sharding.pool import BufferPool

OTHER_TOKENS = ("data", "context")
"""Axes whose ranks train on different tokens. Gradients are summed over those that do not split the tensor.
"""

SAME_TOKENS = "tensor"
"""Axis whose ranks compute on the same tokens."""

EXPERTS = ("expert", "expert_tensor")
"""Axes that split experts.

Along the axis "expert_data", all ranks of a stage have the same piece and compute with it on different
tokens.
"""


class MeshQueries(Protocol):
    """Interface of a mesh, from which groups are made."""

    def group(self, *axes: str) -> Group:
        """Return this rank's group along one axis or several joined axes."""

    def new_subgroup(self, axis: str, size: int | Sequence[int]) -> Group:
        """Return this rank's group of neighbours along an axis, of one size or of successive sizes.

        Collective over the axis.
        """


class NodePeers:
    """Ranks of a group on this node (`inside`), and ranks with the same number on all nodes (`between`)."""

    def __init__(self, inside: Group, between: Group) -> None:
        self.inside, self.between = inside, between
        self._loads = [0] * inside.size

    def assign_rank(self, elements: int) -> int:
        """Return the number of the rank inside that exchanges a bucket: the one with the fewest elements.

        All ranks of the group must call it for the same buckets in the same order. Local.

        Args:
            elements: Number of elements of the bucket.
        """
        number = self._loads.index(min(self._loads))
        self._loads[number] += elements
        return number


@dataclass(frozen=True, eq=False)
class ZeroSharding:
    """Distribution of buckets over the ranks that train them on different tokens.

    Attributes:
        zero: Stage of ZeRO, 0 to 3, as `layout.zero` of the deck.
        group: Ranks that own one slice each: all ranks, or a part of them in hybrid sharding.
        replicas: Ranks of all parts that have the same slice; one rank if there is one part.
        diverging: True if replicas may have different values between synchronizations (see ReplicaSync).
        nodes: Parts of the group between which gradients are compressed, if any.
    """

    zero: int
    group: Group
    replicas: Group
    diverging: bool = False
    nodes: NodePeers | None = None

    @property
    def ranks(self) -> int:
        """Number of all ranks that train these buckets on different tokens."""
        return self.group.size * self.replicas.size

    @property
    def diverging_groups(self) -> tuple[Group, ...]:
        """The group of replicas if they diverge, else nothing."""
        return (self.replicas,) if self.diverging else ()

    @cached_property
    def pool(self) -> BufferPool:
        """Memory that these buckets use in turns."""
        return BufferPool(self.group.empty)

    @cached_property
    def uploads(self) -> SideStream:
        """Stream on which slices are copied from host memory to the GPU."""
        return SideStream()


@dataclass(frozen=True)
class Replication:
    """Ranks that hold the same piece of a parameter as this one, apart from ZeRO's slices.

    Attributes:
        sharding: Distribution over ranks that train on different tokens.
        holders: Ranks that compute with the piece on the same tokens.
        partial: True if the gradient must be summed over `holders`.
        pieces: Tensor group whose ranks together have the whole matrix, if ranks hold pieces of it; None if
            each rank has all of it.
        tied_pipeline: Pipeline whose first and last stage hold the parameter, if any.
        stage_copy: Number of this stage among those that hold the parameter.
        stage_copies: Number of stages that hold it.
    """

    sharding: ZeroSharding
    holders: Group
    partial: bool
    pieces: Group | None
    tied_pipeline: Group | None
    stage_copy: int
    stage_copies: int

    @property
    def counts_slice(self) -> bool:
        """True if this rank adds its slice to sums over ranks: it is the first that holds it."""
        return self.holder_position(False, self.sharding.group, *self.sharding.diverging_groups)[0] == 0

    @property
    def writes_checkpoint(self) -> bool:
        """True if this rank writes what it owns of the piece to a checkpoint.

        With ZeRO the two stages of tied embeddings split them at different places, so only the first one
        writes. Without, each of them may write.
        """
        return self.sharding.zero == 0 or self.stage_copy == 0

    @property
    def replica_groups(self) -> tuple[Group, ...]:
        """Groups over which a state tensor of the whole piece is replicated, if it is not sharded by ZeRO."""
        return (self.sharding.group, self.sharding.replicas, self.holders)

    def holder_position(self, owned: bool, *excluded: Group) -> tuple[int, int]:
        """Return the index of this rank among all that hold the same values, and how many do.

        Example: with ZeRO-1 on 4 data ranks, 2 tensor ranks hold the same norm weight. Then all 8 ranks hold
        the parameter, and `holder_position(False)` counts to 8. Each element is owned by 2 ranks, and
        `holder_position(True)` counts to 2. Gradients before their reduction differ between data ranks, so
        `holder_position(False, sharding.group)` counts to 2 as well.

        Args:
            owned: True for the owned elements, False for the whole piece.
            *excluded: Groups whose ranks have different values, so that each rank counts by itself.
        """
        sliced = owned and self.sharding.zero > 0
        number, copies = (0, 1) if sliced else (self.stage_copy, self.stage_copies)
        groups = [self.sharding.replicas, self.holders]
        for group in groups if sliced else [self.sharding.group, *groups]:
            if group not in excluded:
                number, copies = number * group.size + group.rank, copies * group.size
        return number, copies


class Replications:
    """Cache of the Replication of each Shard on one mesh.

    Args:
        mesh: Mesh of the ranks.
        make_sharding: Makes the ZeroSharding of a group of ranks that train on different tokens.
    """

    def __init__(self, mesh: MeshQueries, make_sharding: Callable[[Group], ZeroSharding]) -> None:
        self._mesh, self._make_sharding = mesh, make_sharding
        self._shardings: dict[tuple[Group, bool], ZeroSharding] = {}
        self._holder_groups: dict[tuple[int, ...], Group] = {}

    @staticmethod
    def unsharded(mesh: MeshQueries) -> Replications:
        """Return replications without ZeRO sharding."""
        return Replications(mesh, lambda group: ZeroSharding(0, group, mesh.new_subgroup("data", 1)))

    @staticmethod
    def of_one_rank(group: Group) -> Replications:
        """Return replications for a rank that is alone in `group` and does not communicate."""
        return Replications(_OneRank(group), lambda ranks: ZeroSharding(0, ranks, ranks))

    @property
    def counts_tokens(self) -> bool:
        """True if this rank counts what all ranks with the same tokens have, such as their loss."""
        return self._mesh.group(SAME_TOKENS).rank == 0

    def of(self, shard: Shard) -> Replication:
        """Return the Replication of a Shard of this rank.

        The first call for a kind of Shard may make a group: it is collective over the ranks of a pipeline
        stage.
        """
        if EXPERTS[0] in shard.split:
            return self._expert_replication
        data_group = self._mesh.group(*(axis for axis in OTHER_TOKENS if axis not in shard.split))
        sharding = self._sharding(data_group, shard.zero_exempt)
        holders, pieces = self._mesh.group(SAME_TOKENS), None
        if SAME_TOKENS in shard.split:
            if shard.holder_counts not in self._holder_groups:
                self._holder_groups[shard.holder_counts] = self._mesh.new_subgroup(
                    SAME_TOKENS, shard.holder_counts or 1
                )
            holders, pieces = self._holder_groups[shard.holder_counts], holders
        pipeline = self._mesh.group("pipeline") if shard.stage_copies > 1 else None
        partial, copy = SAME_TOKENS in shard.partial, (shard.stage_copy, shard.stage_copies)
        return Replication(sharding, holders, partial, pieces, pipeline, *copy)

    def _sharding(self, group: Group, zero_exempt: bool) -> ZeroSharding:
        """Return the ZeroSharding of ranks, made once. Tensors that stay whole have at most stage 2."""
        key = group, zero_exempt
        if key not in self._shardings:
            sharding = self._sharding(group, False) if zero_exempt else self._make_sharding(group)
            if zero_exempt and sharding.zero == 3:
                sharding = replace(sharding, zero=2)
            self._shardings[key] = sharding
        return self._shardings[key]

    @cached_property
    def _expert_replication(self) -> Replication:
        """Replication of experts, which are all split alike."""
        data_group, this_rank = self._mesh.group("expert_data"), self._mesh.new_subgroup("expert_data", 1)
        pieces = self._mesh.group(EXPERTS[1])
        return Replication(self._make_sharding(data_group), this_rank, False, pieces, None, 0, 1)


@dataclass(frozen=True)
class _OneRank:
    """Mesh of one rank."""

    only: Group

    def group(self, *_: str) -> Group:
        return self.only

    def new_subgroup(self, *_: object) -> Group:
        return self.only
