"""What lies in memory between updates: fingerprints of it, by which a bit that changed meanwhile is found.

Everything that the update alone changes is watched: parameters, master weights, moments, and other state, but
for what waits in files. Between replicas the same fingerprints are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import torch
from torch import Tensor

from hpctrain.audit.detected_fault import DetectedFault
from hpctrain.comm.group import Group
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketSegment
from hpctrain.sharding.fingerprint import WORDS, fingerprint
from hpctrain.sharding.state import MASTER, MODEL, OPTIMIZER, StateTensor
from hpctrain.sharding.synchronize import from_other_end

OUTER = "outer/"
"""Prefix of the kinds of state that replicas share, other than the outer model itself."""

_Place = tuple[str, int]

UNDER_WAY = "streaming/"
"""What kinds begin with that are summed while training goes on."""


@dataclass(frozen=True)
class Resting:
    """A piece of memory that nothing but the update changes: `name` says what it is, and of which parameter.

    The ranks of each of `holders` have the same there; so have the first and the last stage of the pipeline
    `ends`, if there is one, of what the ranks `cut`, if any, hold together.
    """

    name: str
    values: Tensor
    holders: tuple[Group, ...] = ()
    ends: Group | None = None
    cut: Group | None = None


class WatchedMemory:
    """Pieces of a rank's memory, with the fingerprints taken last, if any were."""

    def __init__(self, pieces: Iterable[Resting], rank: int) -> None:
        self.pieces, self._rank = list(pieces), rank
        self._prints: Tensor | None = None

    def forget(self) -> None:
        """What lies there was changed rightly."""
        self._prints = None

    def take(self) -> None:
        """From here on nothing is to change."""
        self._prints = self._now()

    def changed(self) -> list[DetectedFault]:
        """What has changed since. Of this rank alone."""
        if self._prints is None:
            return []
        same = (self._now() == self._prints).tolist()
        return [
            DetectedFault("memory", piece.name, "other", (self._rank,), "changed in memory between steps")
            for piece, is_same in zip(self.pieces, same, strict=True)
            if not is_same
        ]

    def _now(self) -> Tensor:
        none = torch.zeros(0, dtype=torch.int64)
        return torch.stack([fingerprint(piece.values) for piece in self.pieces]) if self.pieces else none


class RestingState(WatchedMemory):
    """All of a rank that the update alone changes."""

    def __init__(self, buckets: Sequence[Bucket], state: Iterable[StateTensor]) -> None:
        group = buckets[0].sharding.group
        super().__init__(_resting(buckets, state), group.ranks[group.rank])
        groups = {group: None for piece in self.pieces for group in piece.holders}
        # The ranks of a group come to it in the same order, whatever others they are in.
        self._groups = sorted(groups, key=lambda group: (group.name, group.ranks))

    def differing(self) -> list[DetectedFault]:
        """What other ranks have otherwise, by the fingerprints taken last. Collective."""
        if self._prints is None:
            return []
        faults = []
        numbers = dict(zip(self._places, self._prints.tolist(), strict=True))
        for group in self._groups:
            with_place = zip(self._places, self.pieces, strict=True)
            own = {place: numbers[place] for place, piece in with_place if group in piece.holders}
            digest = int.from_bytes(blake2b(repr(own).encode(), digest_size=7).digest(), "big")
            digests = group.all_gather(torch.tensor([digest], device=group.device)).tolist()
            if len(set(digests)) > 1:
                faults += list(_apart(group, group.all_gather_object(own)))
        return [*faults, *self._differing_ends(numbers)]

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

    def _differing_ends(self, numbers: Mapping[_Place, int]) -> Iterator[DetectedFault]:
        """Yield the tied tensors that differ between the two ends of a pipeline.

        Their slices have different boundaries on the two ends.
        """
        with_place = zip(self._places, self.pieces, strict=True)
        tied = sorted((place, piece) for place, piece in with_place if piece.ends is not None)
        for place, piece in tied:
            own = torch.tensor([numbers[place]], device=piece.values.device)
            if piece.cut is not None:
                piece.cut.all_reduce(own)
            assert piece.ends is not None
            if (int(own) - int(from_other_end(piece.ends, own))) % WORDS:
                both = piece.ends.ranks[0], piece.ends.ranks[-1]
                yield DetectedFault(
                    "copies",
                    piece.name,
                    "step",
                    both,
                    "differs between the first and the last pipeline stage",
                )


def learned(state: Iterable[StateTensor]) -> Iterator[Resting]:
    """What steps themselves change, and nothing else between them."""
    for tensor in state:
        if isinstance(tensor.values, Tensor) and _changes(tensor) and not tensor.kind.startswith(UNDER_WAY):
            yield Resting(f"{tensor.kind}/{tensor.shard.name}", tensor.values)


def _apart(group: Group, of_ranks: Sequence[dict[_Place, int]]) -> Iterator[DetectedFault]:
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


def _resting(buckets: Sequence[Bucket], state: Iterable[StateTensor]) -> Iterator[Resting]:
    """Each piece of memory once; of whole values, which others have updated a part of, all: but where these
    are in common with them.
    """
    whole = {
        bucket: bucket.values
        for bucket in buckets
        if bucket.sharding.zero in {1, 2} and bucket.sharding.group.size > 1 and bucket.sharers == 1
    }
    for bucket, values in whole.items():
        assert values is not None
        for segment in bucket.segments:
            part = values[segment.start : segment.start + segment.length]
            groups = _together((bucket.sharding.group, *_others(bucket, segment, bucket.sharding.apart)))
            ends = segment.replication.ends if part.dtype == torch.float32 else None
            yield Resting(f"{MODEL}/{segment.parameter.shard.name}", part, groups, ends)
    held = {
        segment.parameter.shard.name: (bucket, segment) for bucket in buckets for segment in bucket.segments
    }
    storages = {values.untyped_storage().data_ptr() for values in whole.values() if values is not None}
    for tensor in state:
        here = tensor.values
        if not isinstance(here, Tensor) or _changes(tensor):
            continue
        if tensor.kind == MODEL and here.untyped_storage().data_ptr() in storages:
            continue
        of_bucket = held.get(tensor.shard.name)
        name = f"{tensor.kind}/{tensor.shard.name}"
        is_cut_alike = tensor.kind in {MODEL, MASTER} or tensor.kind.startswith((OPTIMIZER, OUTER))
        if of_bucket is None or not is_cut_alike:
            yield Resting(name, here, _together(tensor.holders))
            continue
        bucket, segment = of_bucket
        group, is_cut = bucket.sharding.group, bucket.sharding.zero > 0
        others = _others(bucket, segment, tensor.of_replicas)
        groups = _together((*(() if is_cut else (group,)), *others))
        ends = segment.replication.ends if tensor.is_weight and here.dtype == torch.float32 else None
        yield Resting(name, here, groups, ends, group if ends is not None and is_cut else None)


def _changes(tensor: StateTensor) -> bool:
    """Whether something else than the update changes it."""
    in_step = tensor.changes_in_step and tensor.kind not in {MODEL, MASTER}
    return in_step or tensor.kind.startswith(UNDER_WAY)


def _others(bucket: Bucket, segment: BucketSegment, of_replicas: bool) -> tuple[Group, ...]:
    """Return the groups whose ranks hold the same slice of a parameter (`of_replicas`: in one replica)."""
    replicas = () if of_replicas else (bucket.sharding.replicas,)
    return (segment.replication.holders, *replicas)


def _together(groups: Iterable[Group]) -> tuple[Group, ...]:
    return tuple(dict.fromkeys(group for group in groups if group.size > 1))
