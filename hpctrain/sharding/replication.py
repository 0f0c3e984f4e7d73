"""Which other ranks hold a rank's piece of a tensor, and over whom its gradient is summed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from hpctrain.comm.group import Group
from hpctrain.host.device import SideStream
from hpctrain.parallel.shard import Shard
from hpctrain.sharding.pool import Pool

OTHER_TOKENS = ("data", "context")
"""Axes whose ranks train on other tokens: gradients are summed over those that do not cut the tensor."""

SAME_TOKENS = "tensor"
"""The axis whose ranks compute on the same tokens."""

EXPERTS = ("expert", "expert_tensor")
"""The axes that cut experts. All ranks of a stage that hold the same piece, along the axis "expert_data",
compute with it on other tokens.
"""


class MeshQueries(Protocol):
    """Interface of a mesh, from which groups are made."""

    def group(self, *axes: str) -> Group:
        """Return this rank's group along one axis or several joined axes."""

    def new_subgroup(self, axis: str, size: int) -> Group:
        """Return this rank's group of `size` neighbours along an axis. Collective over the axis."""


class NodePeers:
    """The ranks of a group that share a node with this one, and this rank's peers on all nodes."""

    def __init__(self, inside: Group, between: Group) -> None:
        self.inside, self.between = inside, between
        self._loads = [0] * inside.size

    def turn(self, elements: int) -> int:
        """Which of the ranks inside is to speak for its node, of so many elements: who does for the fewest.

        All ranks of the group ask for the same in one order.
        """
        number = self._loads.index(min(self._loads))
        self._loads[number] += elements
        return number


@dataclass(frozen=True, eq=False)
class ZeroSharding:
    """How buckets lie on the ranks that train them on other tokens.

    `zero` is that of the deck's layout, 0 to 3. Slices are cut over `group`, all of these ranks or, in hybrid
    sharding, a part of them; `replicas` are the ranks of all parts that have the same slice, one where there
    is one part. Where these are `apart`, as an Outer may let them be, each has values of its own in it.
    `nodes`, if any, are the parts of the group between which what is summed is compressed.
    """

    zero: int
    group: Group
    replicas: Group
    apart: bool = False
    nodes: NodePeers | None = None

    @property
    def ranks(self) -> int:
        """Number of all ranks that train these buckets on different tokens."""
        return self.group.size * self.replicas.size

    @property
    def parted(self) -> tuple[Group, ...]:
        """The replicas where they are apart."""
        return (self.replicas,) if self.apart else ()

    @cached_property
    def pool(self) -> Pool:
        """Memory that these buckets take turns in."""
        return Pool(self.group.empty)

    @cached_property
    def uploads(self) -> SideStream:
        """Stream on which slices that lie in host memory come to the GPU."""
        return SideStream()


@dataclass(frozen=True)
class Replication:
    """Where else the piece of a Shard lies, besides in the ranks' own slices of it.

    `holders` are the ranks that compute with it on the same tokens; its gradient arrives there in parts where
    it is `partial`. `pieces`, if any, are the ranks that hold all pieces of its matrices, one each or copies.
    `ends`, if any, is the pipeline whose first and last stage hold it; this is number `stage_copy` of the
    `stage_copies` stages that do.
    """

    sharding: ZeroSharding
    holders: Group
    partial: bool
    pieces: Group | None
    ends: Group | None
    stage_copy: int
    stage_copies: int

    @property
    def counted(self) -> bool:
        """True if this rank counts its slice: it is the first of all ranks that hold the same slice."""
        return self.copy(False, self.sharding.group, *self.sharding.parted)[0] == 0

    @property
    def written(self) -> bool:
        """Whether this rank takes part in writing what it owns of the piece.

        Where tied embeddings are whole, both stages' are copies of each other; slices are cut in other places
        on the two, so that the first stage's alone are written.
        """
        return self.sharding.zero == 0 or self.stage_copy == 0

    @property
    def everyone(self) -> tuple[Group, ...]:
        """Groups whose ranks hold the same piece of a parameter if ZeRO does not shard it."""
        return (self.sharding.group, self.sharding.replicas, self.holders)

    def copy(self, owned: bool, *apart: Group) -> tuple[int, int]:
        """(number of this copy, copies) of the piece, or of what this rank owns of it, where the ranks of the
        groups `apart` have values of their own.
        """
        cut = owned and self.sharding.zero > 0
        number, copies = (0, 1) if cut else (self.stage_copy, self.stage_copies)
        others = [self.sharding.replicas, self.holders]
        for group in others if cut else [self.sharding.group, *others]:
            if group not in apart:
                number, copies = number * group.size + group.rank, copies * group.size
        return number, copies


class Replications:
    """The Replication of each Shard on one mesh.

    `cut` makes the ZeroSharding of ranks that train on other tokens. `of` makes a group when it first meets a
    Shard that needs it, which is collective over the ranks of a pipeline stage.
    """

    def __init__(self, mesh: MeshQueries, cut: Callable[[Group], ZeroSharding]) -> None:
        self._mesh, self._cut = mesh, cut
        self._shardings: dict[tuple[Group, bool], ZeroSharding] = {}
        self._sharing: dict[int, Group] = {}
        self._experts: Replication | None = None

    @staticmethod
    def uncut(mesh: MeshQueries) -> Replications:
        """Return replications without ZeRO sharding."""
        return Replications(mesh, lambda everyone: ZeroSharding(0, everyone, mesh.new_subgroup("data", 1)))

    @staticmethod
    def alone(group: Group) -> Replications:
        """On the one rank of a group; what others hold does not matter."""
        return Replications(_OneRank(group), lambda everyone: ZeroSharding(0, everyone, everyone))

    @property
    def speaks(self) -> bool:
        """Whether this rank counts what all that compute on the same tokens have, such as their loss."""
        return self._mesh.group(SAME_TOKENS).rank == 0

    def of(self, shard: Shard) -> Replication:
        """The answer for a Shard of this rank."""
        if EXPERTS[0] in shard.split:
            return self._of_expert()
        everyone = self._mesh.group(*(axis for axis in OTHER_TOKENS if axis not in shard.split))
        sharding = self._sharding(everyone, shard.stays)
        holders = self._mesh.group(SAME_TOKENS)
        if SAME_TOKENS in shard.split:
            if shard.copies not in self._sharing:
                self._sharing[shard.copies] = self._mesh.new_subgroup(SAME_TOKENS, shard.copies)
            holders = self._sharing[shard.copies]
        return Replication(
            sharding,
            holders,
            SAME_TOKENS in shard.partial,
            self._mesh.group(SAME_TOKENS) if SAME_TOKENS in shard.split else None,
            self._mesh.group("pipeline") if shard.stage_copies > 1 else None,
            shard.stage_copy,
            shard.stage_copies,
        )

    def _sharding(self, everyone: Group, stays: bool) -> ZeroSharding:
        """What `cut` makes, once; another one of what stays whole where that cuts parameters."""
        key = everyone, stays
        if key not in self._shardings:
            cut = self._sharding(everyone, False) if stays else self._cut(everyone)
            self._shardings[key] = replace(cut, zero=2) if stays and cut.zero == 3 else cut
        return self._shardings[key]

    def _of_expert(self) -> Replication:
        """That of experts' pieces, which are all cut alike."""
        if self._experts is None:
            everyone = self._mesh.group("expert_data")
            alone = self._mesh.new_subgroup("expert_data", 1)
            pieces = self._mesh.group(EXPERTS[1])
            self._experts = Replication(self._cut(everyone), alone, False, pieces, None, 0, 1)
        return self._experts


@dataclass(frozen=True)
class _OneRank:
    """Axes of one rank."""

    only: Group

    def group(self, *_: str) -> Group:
        return self.only

    def new_subgroup(self, *_: object) -> Group:
        return self.only
