"""State: whatever belongs to parameters, named and placed in the terms of a Shard.

Checkpoint, accounts and plan go over StateTensors and know nothing of who keeps them, or what for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from hpctrain.comm.group import Group
from hpctrain.memory.accounts import storage_bytes
from hpctrain.memory.scratch import Flat
from hpctrain.model.foreign.buffers import KIND as BUFFER
from hpctrain.parallel.fp8.history import KIND as HISTORY
from hpctrain.parallel.shard import Shard
from hpctrain.parallel.step_statistics import UsesStatistics
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketSegment
from hpctrain.sharding.replication import Replications

MODEL = "model"
"""The kind of parameters, in the format in which layers compute with them."""

MASTER = "master"
"""The kind of the fp32 weights that are updated, where the parameters have another format."""

OPTIMIZER = "optimizer/"
"""What kinds begin with that an UpdateRule names."""

Resumed = Literal["always", "if stored", "as many", "as a sum", "never"]


@dataclass(frozen=True)
class StateTensor:
    """This rank's elements of one tensor that belongs to the parameter `shard.name`.

    `kind` says whose and what it is: "model", "optimizer/exp_avg", "reducer/residual". `shard` is the
    parameter's, or one of that name for a shape of its own. `values`, flat, are the elements `offset` to
    `offset + values.numel()` of the Shard's local piece, row-major. This rank is number `copy[0]` of the
    `copy[1]` ranks that hold just these; with `written` it takes part in writing them.

    A run that goes on cannot do without what is `resumed` "always", leaves what the file lacks as it began
    with "if stored" or "as a sum", and makes by itself what it reads "never". What each of another number of
    ranks had of its own goes on "as a sum": that of several goes to one. Of a row of numbers, the newest
    first, "as many" go on as both have. Forward, backward or sums change
    what `changes_in_step`; all else is changed by the update alone. What is `of_replicas`, each one's own, is
    stored beside what they have in common, if anything. A sum that a file lacks is made of what it has of
    another kind, which is the whole of it, if that is `made_of` one. The ranks of each of the groups
    `holders` have the same values after each update. Who makes state of a bucket need not name them.
    """

    kind: str
    shard: Shard
    values: Flat
    offset: int
    copy: tuple[int, int]
    written: bool
    resumed: Resumed = "if stored"
    changes_in_step: bool = True
    of_replicas: bool = False
    made_of: str = ""
    holders: tuple[Group, ...] = ()

    @property
    def is_weight(self) -> bool:
        """Whether it is updated itself, by whatever else there is."""
        return self.kind in {MODEL, MASTER} and self.resumed == "always"


@runtime_checkable
class Stateful(Protocol):
    """Optimizer, reducer, outer synchronization, layer or product that has state."""

    def state(self) -> Iterator[StateTensor]:
        """Yield all tensors of the state. They are the same tensors in every step."""


def own_state(
    kind: str,
    flat: Flat,
    bucket: Bucket,
    resumed: Resumed = "if stored",
    changes_in_step: bool = True,
    apart: bool | None = None,
) -> Iterator[StateTensor]:
    """State of the shape of the parameters, by parameter: `flat` has a value for each of the bucket's own.

    What each replica has of its own, which `apart` says, or else the bucket's Sharding, is stored as
    [replicas, ...], each one's behind the other's. State of parameters that are not trained begins anew, or
    it would go on to change them.
    """
    for segment, values, offset in bucket.owned(flat):
        yield segment_state(kind, segment, values, offset, bucket, resumed, changes_in_step, apart)


def segment_state(
    kind: str,
    segment: BucketSegment,
    values: Flat,
    offset: int,
    bucket: Bucket,
    resumed: Resumed = "if stored",
    changes_in_step: bool = True,
    apart: bool | None = None,
    shape: Shard | None = None,
    joined: Group | None = None,
) -> StateTensor:
    """As `own_state`, of one parameter: its elements from `offset` on, or those of a `shape` of its own.

    The ranks `joined`, if any, which hold other pieces of the parameter, have the same of this.
    """
    replicas = bucket.sharding.replicas
    apart = bucket.sharding.apart if apart is None else apart
    held, shard = segment.replication, shape or segment.parameter.shard
    if joined is not None:
        held = replace(held, holders=joined)
    if apart:
        shard = shard.stacked(replicas.rank, replicas.size)
    copy = held.copy(True, replicas) if apart else held.copy(True)
    when: Resumed = resumed if kind in {MODEL, MASTER} or segment.parameter.requires_grad else "never"
    return StateTensor(kind, shard, values, offset, copy, held.written, when, changes_in_step, apart)


def state_of_ranks(kind: str, flat: Tensor, bucket: Bucket, made_of: str = "") -> Iterator[StateTensor]:
    """State that each rank which trains the bucket on other tokens has of its own, by parameter: `flat` has a
    value for each of the bucket's elements. It is stored as [ranks, ...], each one's behind the other's.
    """
    group, replicas = bucket.sharding.group, bucket.sharding.replicas
    number = replicas.rank * group.size + group.rank
    for segment, values, offset in bucket.cut(flat, slice(0, bucket.length)):
        shard = segment.parameter.shard.stacked(number, bucket.sharding.ranks)
        copy = segment.replication.copy(False, group, replicas)
        yield StateTensor(kind, shard, values, offset, copy, True, "as a sum", made_of=made_of)


@runtime_checkable
class KeepsState(Protocol):
    """Module or product that has state with shapes of its own."""

    def state(self) -> Iterator[tuple[str, Shard, Tensor]]:
        """Yield the kind, the shard (named as the parameter) and this rank's flat piece of each tensor.

        All ranks that hold a tensor have the same values. A new run initializes it.
        """


class ModuleState:
    """What modules, and their Products, keep, which may need new groups, and who of them learns of a step."""

    def __init__(self, modules: Iterable[nn.Module], replications: Replications) -> None:
        inner = [each for module in modules for each in module.modules()]
        held = [each for module in inner for each in vars(module).values()]
        every = [*inner, *held, *(each for many in held if isinstance(many, list | tuple) for each in many)]
        # Types are asked, not objects: that takes 8 ms a block less, and an attribute is no method of theirs.
        kinds = {kind for kind in set(map(type, every)) if issubclass(kind, KeepsState | UsesStatistics)}
        once = dict.fromkeys(each for each in every if type(each) in kinds)
        self._keeping: list[KeepsState] = [each for each in once if issubclass(type(each), KeepsState)]
        self.learning: list[UsesStatistics] = [
            each for each in once if issubclass(type(each), UsesStatistics)
        ]
        shards = [shard for each in self._keeping for _, shard, _ in each.state()]
        self._replications = {shard: replications.of(shard) for shard in shards}

    def state(self) -> Iterator[StateTensor]:
        """Yield what all modules keep. Passes change the buffers of a module; the update changes the rest."""
        for each in self._keeping:
            for kind, shard, values in each.state():
                resumed: Resumed = "as many" if kind.startswith(f"{HISTORY}/") else "if stored"
                replication, changes = self._replications[shard], kind == BUFFER
                holders = () if changes else replication.everyone
                copy = replication.copy(False)
                yield StateTensor(kind, shard, values, 0, copy, True, resumed, changes, holders=holders)


def state_bytes(tensors: Iterable[StateTensor], buckets: Sequence[Bucket]) -> int:
    """Bytes of the memory behind state where layers compute, without what is the parameters' own."""
    devices = {bucket.sharding.group.device for bucket in buckets}
    own = [bucket.own_values for bucket in buckets]
    beside = [tensor.values for tensor in tensors if tensor.values.device in devices]
    return storage_bytes([*beside, *own]) - storage_bytes(own)
