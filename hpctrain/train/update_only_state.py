"""Detection of bits that change in memory between updates.

Fingerprints are taken after an update and compared before the next one. They cover everything that only the
update changes: parameters, master weights, moments and other state, except tensors in files. The same
fingerprints are compared between ranks that should hold the same values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import torch
from torch import Tensor

from hpctrain.audit.bits import WORD_MODULUS, word_sum
from hpctrain.audit.detected_fault import DetectedFault
from hpctrain.comm.group import Group
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketSegment
from hpctrain.sharding.state import MASTER, MODEL, OPTIMIZER, StateTensor
from hpctrain.sharding.synchronize import exchange_with_other_end

OUTER = "outer/"
"""Prefix of the kinds of state that replicas share, other than the outer model itself."""

_Place = tuple[str, int]
"""Name of a tensor, and the number of earlier tensors with the same name."""

IN_FLIGHT = "streaming/"
"""Prefix of the kinds of state that are reduced while training continues."""


@dataclass(frozen=True)
class WatchedTensor:
    """Tensor that only the update changes.

    Attributes:
        name: What it is, and of which parameter.
        values: The tensor.
        holders: Groups whose ranks have the same values.
        tied_pipeline: Pipeline whose first and last stage have the same values, if any.
        slice_group: Group whose ranks hold one slice each of what is compared between these stages, if any.
    """

    name: str
    values: Tensor
    holders: tuple[Group, ...] = ()
    tied_pipeline: Group | None = None
    slice_group: Group | None = None


class WatchedMemory:
    """Tensors of one rank with their last fingerprints, if any.

    Args:
        pieces: The tensors.
        rank: Number of this rank in the world.
    """

    def __init__(self, pieces: Iterable[WatchedTensor], rank: int) -> None:
        self.pieces, self._rank = list(pieces), rank
        self._prints: Tensor | None = None

    def discard(self) -> None:
        """Discard the fingerprints, because the tensors are changed on purpose."""
        self._prints = None

    def record(self) -> None:
        """Compute and store the fingerprints. Afterwards the tensors must not change."""
        self._prints = self._current()

    def find_changes(self) -> list[DetectedFault]:
        """Return a fault for each tensor that has changed since `record`. Local."""
        if self._prints is None:
            return []
        same = (self._current() == self._prints).tolist()
        return [
            DetectedFault("memory", piece.name, "other", (self._rank,), "changed in memory between steps")
            for piece, is_same in zip(self.pieces, same, strict=True)
            if not is_same
        ]

    def _current(self) -> Tensor:
        none = torch.zeros(0, dtype=torch.int64)
        return torch.stack([word_sum(piece.values) for piece in self.pieces]) if self.pieces else none


class UpdateOnlyState(WatchedMemory):
    """Fingerprints of the tensors of this rank that only the update changes.

    Args:
        buckets: Buckets of this rank.
        state: All its state.
    """

    def __init__(self, buckets: Sequence[Bucket], state: Iterable[StateTensor]) -> None:
        group = buckets[0].sharding.group
        super().__init__(_update_only_tensors(buckets, state), group.ranks[group.rank])
        groups = {group: None for piece in self.pieces for group in piece.holders}
        # Sort, so that the ranks of all groups compare them in the same order.
        self._groups = sorted(groups, key=lambda group: (group.name, group.ranks))

    def find_replica_differences(self) -> list[DetectedFault]:
        """Return a fault for each tensor that differs between ranks, by the last fingerprints. Collective."""
        if self._prints is None:
            return []
        faults = []
        numbers = dict(zip(self._places, self._prints.tolist(), strict=True))
        for group in self._groups:
            with_place = zip(self._places, self.pieces, strict=True)
            fingerprints = {place: numbers[place] for place, piece in with_place if group in piece.holders}
            digest = int.from_bytes(blake2b(repr(fingerprints).encode(), digest_size=7).digest(), "big")
            digests = group.all_gather(torch.tensor([digest], device=group.device)).tolist()
            if len(set(digests)) > 1:
                faults += list(_minority_faults(group, group.all_gather_object(fingerprints)))
        return [*faults, *self._tied_differences(numbers)]

    @cached_property
    def _places(self) -> list[_Place]:
        """Name of each piece, and the number of earlier pieces with that name.

        The number is needed since tensors of the outer model have the same names as those of a replica.
        """
        counts: Counter[str] = Counter()
        places = []
        for piece in self.pieces:
            places.append((piece.name, counts[piece.name]))
            counts[piece.name] += 1
        return places

    def _tied_differences(self, numbers: Mapping[_Place, int]) -> Iterator[DetectedFault]:
        """Yield the tied tensors that differ between the first and the last stage of a pipeline.

        Their slices have different boundaries on the two stages.
        """
        with_place = zip(self._places, self.pieces, strict=True)
        tied = sorted((place, piece) for place, piece in with_place if piece.tied_pipeline is not None)
        for place, piece in tied:
            total = torch.tensor([numbers[place]], device=piece.values.device)
            if piece.slice_group is not None:
                piece.slice_group.all_reduce(total)
            assert piece.tied_pipeline is not None
            if (int(total) - int(exchange_with_other_end(piece.tied_pipeline, total))) % WORD_MODULUS:
                both = piece.tied_pipeline.ranks[0], piece.tied_pipeline.ranks[-1]
                yield DetectedFault(
                    "copies",
                    piece.name,
                    "step",
                    both,
                    "differs between the first and the last pipeline stage",
                )


def tensors_changed_in_steps(state: Iterable[StateTensor]) -> Iterator[WatchedTensor]:
    """Yield the tensors that steps themselves change, and that nothing else changes in between."""
    for tensor in state:
        if isinstance(tensor.values, Tensor) and _changes(tensor) and not tensor.kind.startswith(IN_FLIGHT):
            yield WatchedTensor(f"{tensor.kind}/{tensor.shard.name}", tensor.values)


def _minority_faults(group: Group, of_ranks: Sequence[dict[_Place, int]]) -> Iterator[DetectedFault]:
    """Yield a fault for each tensor that differs within a group; it names the ranks in the minority."""
    for place in of_ranks[0]:
        name, _ = place
        values = [each.get(place) for each in of_ranks]
        counts = Counter(values)
        if len(counts) == 1:
            continue
        (most, times), (_, next_times), *_ = counts.most_common(2)
        right = most if times > next_times else None
        ranks = tuple(rank for rank, value in zip(group.ranks, values, strict=True) if value != right)
        yield DetectedFault("copies", name, "step", ranks, f"differs between ranks of {group.name}")


def _update_only_tensors(buckets: Sequence[Bucket], state: Iterable[StateTensor]) -> Iterator[WatchedTensor]:
    """Yield each tensor once.

    With ZeRO-1 and 2, other ranks have updated parts of the parameters, so all parameters of a bucket are
    included, unless the ranks share their memory.
    """
    gathered = {
        bucket: bucket.values
        for bucket in buckets
        if bucket.sharding.zero in {1, 2} and bucket.sharding.group.size > 1 and bucket.sharers == 1
    }
    for bucket, values in gathered.items():
        assert values is not None
        for segment in bucket.segments:
            part = values[segment.start : segment.start + segment.length]
            groups = _distinct_groups(
                (bucket.sharding.group, *_groups_with_same_slice(bucket, segment, bucket.sharding.diverging))
            )
            tied_pipeline = segment.replication.tied_pipeline if part.dtype == torch.float32 else None
            yield WatchedTensor(f"{MODEL}/{segment.parameter.shard.name}", part, groups, tied_pipeline)
    segments = {
        segment.parameter.shard.name: (bucket, segment) for bucket in buckets for segment in bucket.segments
    }
    storages = {values.untyped_storage().data_ptr() for values in gathered.values() if values is not None}
    for tensor in state:
        tensor_values = tensor.values
        if not isinstance(tensor_values, Tensor) or _changes(tensor):
            continue
        if tensor.kind == MODEL and tensor_values.untyped_storage().data_ptr() in storages:
            continue
        of_bucket = segments.get(tensor.shard.name)
        name = f"{tensor.kind}/{tensor.shard.name}"
        has_bucket_layout = tensor.kind in {MODEL, MASTER} or tensor.kind.startswith((OPTIMIZER, OUTER))
        if of_bucket is None or not has_bucket_layout:
            yield WatchedTensor(name, tensor_values, _distinct_groups(tensor.holders))
            continue
        bucket, segment = of_bucket
        group, is_sliced = bucket.sharding.group, bucket.sharding.zero > 0
        other_groups = _groups_with_same_slice(bucket, segment, tensor.per_replica)
        groups = _distinct_groups((*(() if is_sliced else (group,)), *other_groups))
        tied_pipeline = (
            segment.replication.tied_pipeline
            if tensor.is_weight and tensor_values.dtype == torch.float32
            else None
        )
        yield WatchedTensor(
            name,
            tensor_values,
            groups,
            tied_pipeline,
            group if tied_pipeline is not None and is_sliced else None,
        )


def _changes(tensor: StateTensor) -> bool:
    """Return True if something other than the update changes the tensor."""
    in_step = tensor.changes_in_step and tensor.kind not in {MODEL, MASTER}
    return in_step or tensor.kind.startswith(IN_FLIGHT)


def _groups_with_same_slice(bucket: Bucket, segment: BucketSegment, per_replica: bool) -> tuple[Group, ...]:
    """Return the groups whose ranks hold the same slice of a parameter (`per_replica`: in one replica)."""
    replicas = () if per_replica else (bucket.sharding.replicas,)
    return (segment.replication.holders, *replicas)


def _distinct_groups(groups: Iterable[Group]) -> tuple[Group, ...]:
    """Return the groups of several ranks, each once."""
    return tuple(dict.fromkeys(group for group in groups if group.size > 1))
