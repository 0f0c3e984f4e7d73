"""State that belongs to parameters, named and placed like a Shard.

Checkpoints, memory accounts and plans read StateTensors, and need not know who stores them and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from hpctrain.comm.group import Group
from hpctrain.memory.scratch import Flat
from hpctrain.model.modules.module_buffers import BUFFER_KIND as BUFFER
from hpctrain.parallel.fp8.delayed_matmul import HISTORY_KIND as HISTORY
from hpctrain.parallel.shards import Shard
from hpctrain.parallel.step_statistics import UsesStatistics
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketSegment
from hpctrain.sharding.replication import Replications

MODEL = "model"
"""Kind of parameters in the format in which layers compute with them."""

MASTER = "master"
"""Kind of the fp32 weights that are updated, if parameters have another format."""

OPTIMIZER = "optimizer/"
"""Prefix of the kinds of state that an UpdateRule defines."""

ResumeMode = Literal["always", "if stored", "as many", "as a sum", "never"]
"""How a resumed run uses a tensor of a checkpoint.

- "always": The tensor is necessary.
- "if stored": It keeps its initial value if the file lacks it.
- "as many": It is a row of numbers, the newest first; as many are loaded as both have.
- "as a sum": Each rank has its own. If the number of ranks changes, the tensors of several ranks are added.
- "never": The run computes it.
"""


@dataclass(frozen=True)
class StateTensor:
    """Elements of one tensor of state, which belongs to the parameter `shard.name`, on this rank.

    Attributes:
        kind: What it is: "model", "optimizer/exp_avg", "reducer/residual".
        shard: Shard of the parameter, or one of that name with another shape.
        values: Elements `offset` to `offset + values.numel() - 1` of the Shard's local tensor, row-major,
            flat.
        offset: Index of the first element.
        holder_position: Index of this rank among those that hold exactly these elements, and how many do.
        writes_checkpoint: True if this rank takes part in writing them to checkpoints.
        resume_mode: How a resumed run uses it.
        changes_in_step: True if the forward pass, the backward pass or reductions change it; False if only
            the update does.
        per_replica: True if each replica has its own, which is stored besides what replicas have in common.
        fallback_kind: Kind that a resumed run reads if a checkpoint does not have this one. It holds the sum
            over all ranks, which then goes to the first rank. "" if there is none.
        holders: Groups whose ranks have the same values after each update; unnecessary for state of a bucket.
    """

    kind: str
    shard: Shard
    values: Flat
    offset: int
    holder_position: tuple[int, int]
    writes_checkpoint: bool
    resume_mode: ResumeMode = "if stored"
    changes_in_step: bool = True
    per_replica: bool = False
    fallback_kind: str = ""
    holders: tuple[Group, ...] = ()

    @property
    def is_weight(self) -> bool:
        """True if it is a weight that is updated."""
        return self.kind in {MODEL, MASTER} and self.resume_mode == "always"


@runtime_checkable
class Stateful(Protocol):
    """Optimizer, reduction, replica synchronization, layer or product that has state."""

    def state(self) -> Iterator[StateTensor]:
        """Yield all tensors of the state. They are the same tensors in every step."""


@dataclass(frozen=True)
class StateOptions:
    """Options of `segment_state`: use in a resumed run, and ranks that have the tensor.

    Attributes:
        resume_mode: How a resumed run uses it.
        changes_in_step: True if something other than the update changes it.
        diverging: True if each replica has its own, which is stored as [replicas, ...]. None is the bucket's
            own setting.
        shape: Shard of a shape other than the parameter's; None is the parameter's.
        same_values_group: Group whose ranks hold different pieces of the parameter, but equal values of this
            tensor.
        owned_only: True if a rank has only the values of elements that it owns; False if all ranks have all.
    """

    resume_mode: ResumeMode = "if stored"
    changes_in_step: bool = True
    diverging: bool | None = None
    shape: Shard | None = None
    same_values_group: Group | None = None
    owned_only: bool = True


COMMON = StateOptions(diverging=False)
"""Options of state that all replicas have in common."""

UPDATED = StateOptions("always", changes_in_step=False)
"""Options of state that is necessary, and that only the update changes."""


def owned_state(kind: str, flat: Flat, bucket: Bucket, options: StateOptions) -> Iterator[StateTensor]:
    """Yield state with the shape of the parameters, by parameter.

    State of parameters that are not trained is not resumed, because it would change them.

    Args:
        kind: Kind of the state.
        flat: Tensor with one value for each element that this rank owns.
        bucket: The bucket.
        options: Use in a resumed run, and ranks that have it.
    """
    for segment, values, offset in bucket.owned_segments(flat):
        yield segment_state(kind, segment, values, offset, bucket, options)


def segment_state(
    kind: str, segment: BucketSegment, values: Flat, offset: int, bucket: Bucket, options: StateOptions
) -> StateTensor:
    """Return state of one parameter: its elements from index `offset` on."""
    replicas = bucket.sharding.replicas
    diverging = bucket.sharding.diverging if options.diverging is None else options.diverging
    replication, shard = segment.replication, options.shape or segment.parameter.shard
    if options.same_values_group is not None:
        replication = replace(replication, holders=options.same_values_group)
    if diverging:
        shard = shard.stacked(replicas.rank, replicas.size)
    different = (replicas,) if diverging else ()
    groups = () if options.owned_only else replication.replica_groups
    holders = tuple(group for group in groups if group not in different)
    position = replication.holder_position(options.owned_only, *different)
    writes = replication.writes_checkpoint or not options.owned_only
    is_resumed = kind in {MODEL, MASTER} or segment.parameter.requires_grad
    mode, changes = options.resume_mode if is_resumed else "never", options.changes_in_step
    return StateTensor(
        kind, shard, values, offset, position, writes, mode, changes, diverging, holders=holders
    )


def state_of_ranks(kind: str, flat: Tensor, bucket: Bucket, fallback_kind: str = "") -> Iterator[StateTensor]:
    """Yield state that each rank has of its own, by parameter, as `rank_state`.

    Args:
        kind: Kind of the state.
        flat: Tensor with one value for each element of the bucket.
        bucket: The bucket.
        fallback_kind: Kind from which a missing sum is made.
    """
    for segment, values, offset in bucket.segments_within(flat, slice(0, bucket.length)):
        yield replace(rank_state(kind, segment, values, bucket, offset), fallback_kind=fallback_kind)


def rank_state(
    kind: str, segment: BucketSegment, values: Tensor, bucket: Bucket, offset: int = 0, further_rows: int = 0
) -> StateTensor:
    """Return state of one parameter that each rank has of its own: its elements from index `offset` on.

    Each rank that trains the bucket on different tokens has its own, and it is stored as [ranks, ...].

    Args:
        kind: Kind of the state.
        segment: Place of the parameter in the bucket.
        values: The elements.
        bucket: The bucket.
        offset: Index of the first element.
        further_rows: Number of rows after those of the ranks of each replica.
    """
    group, replicas = bucket.sharding.group, bucket.sharding.replicas
    rows = group.size + further_rows
    shard = segment.parameter.shard.stacked(replicas.rank * rows + group.rank, replicas.size * rows)
    position = segment.replication.holder_position(False, group, replicas)
    return StateTensor(kind, shard, values, offset, position, True, "as a sum")


@runtime_checkable
class KeepsState(Protocol):
    """Module or product that has state with shapes of its own."""

    def state(self) -> Iterator[tuple[str, Shard, Tensor]]:
        """Yield the kind, the shard (named as the parameter) and this rank's flat piece of each tensor.

        All ranks that hold a tensor have the same values. A new run initializes it.
        """


class ModuleState:
    """State that modules and their products keep, and the modules that use statistics of a step.

    Collective if it makes new groups.

    Args:
        modules: All modules of this rank.
        replications: Replications of this rank.

    Attributes:
        statistics_users: Modules and products that receive statistics of each step.
    """

    def __init__(self, modules: Iterable[nn.Module], replications: Replications) -> None:
        inner = [each for module in modules for each in module.modules()]
        attributes = [each for module in inner for each in vars(module).values()]
        members = chain.from_iterable(each for each in attributes if isinstance(each, list | tuple))
        objects = [*inner, *attributes, *members]
        # Ask types, not objects: it saves 8 ms per block, and attributes of an object are not its methods.
        kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, KeepsState | UsesStatistics)}
        unique_objects = dict.fromkeys(each for each in objects if type(each) in kinds)
        self._keeping: list[KeepsState] = [
            each for each in unique_objects if issubclass(type(each), KeepsState)
        ]
        self.statistics_users: list[UsesStatistics] = [
            each for each in unique_objects if issubclass(type(each), UsesStatistics)
        ]
        shards = [shard for each in self._keeping for _, shard, _ in each.state()]
        self._replications = {shard: replications.of(shard) for shard in shards}

    def state(self) -> Iterator[StateTensor]:
        """Yield the state of all modules.

        The forward pass changes the buffers of a module; only the update changes the rest.
        """
        for each in self._keeping:
            for kind, shard, values in each.state():
                mode: ResumeMode = "as many" if kind.startswith(f"{HISTORY}/") else "if stored"
                replication, changes = self._replications[shard], kind == BUFFER
                holders = () if changes else replication.replica_groups
                position = replication.holder_position(False)
                yield StateTensor(kind, shard, values, 0, position, True, mode, changes, holders=holders)
