"""Weights from one layout to another over the same ranks, without a file: as from training to generation.

Every rank tells which boxes of which tensors it holds, and which it is to hold. From that all ranks find the
same plan: who sends what to whom, in rounds of bounded size, so that no rank ever has more of a model at once
than its two stages and a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.checkpoint.layout import Index, TensorBox, TensorRange, rectangles_of
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.engine.stage import Stage
from hpctrain.errors import HpctrainError
from hpctrain.memory.scratch import Flat
from hpctrain.optim.optimizer import refresh
from hpctrain.sharding.bucket import Bucket, await_readers
from hpctrain.sharding.state import MODEL

BYTES_AT_A_TIME = 64 << 20
"""Of a round: a rank that has sent or is to get as many in it takes part in it no further."""

_MODEL = f"/{MODEL}/"


class Box(NamedTuple):
    """A rectangle of a global tensor."""

    start: Index
    shape: Index

    @property
    def elements(self) -> int:
        """All of it."""
        return prod(self.shape)

    def common(self, other: Box) -> Box | None:
        """What lies in both, if anything."""
        both = list(zip(self.start, self.shape, other.start, other.shape, strict=True))
        start = tuple(max(a, b) for a, _, b, _ in both)
        shape = tuple(min(a + n, b + m) - first for (a, n, b, m), first in zip(both, start, strict=True))
        return Box(start, shape) if min(shape) > 0 else None

    def cut(self, limit: int) -> Iterator[Box]:
        """In boxes of at most so many elements."""
        for part in TensorBox(self.start, self.shape, 0, (0,) * len(self.shape)).cut(limit):
            yield Box(part.start, part.shape)


class TransferMessage(NamedTuple):
    """A box of a tensor that goes from one rank to another, or stays on one."""

    sender: int
    receiver: int
    name: str
    box: Box


@dataclass(frozen=True)
class TransferTensor:
    """What a rank holds of a tensor: rectangles of its values."""

    values: Flat
    rectangles: list[TensorBox]

    @staticmethod
    def of(entry: TensorRange) -> TransferTensor:
        """All that an TensorRange does, without padding."""
        return TransferTensor(entry.values, rectangles_of(entry))

    @property
    def boxes(self) -> list[Box]:
        """Of the rectangles."""
        return [Box(each.start, each.shape) for each in self.rectangles]

    def at(self, box: Box) -> TensorBox:
        """The part of a rectangle that is this box, all of which is in one of them."""
        for whole in self.rectangles:
            if Box(whole.start, whole.shape).common(box) == box:
                steps = zip(box.start, whole.start, whole.strides, strict=True)
                at = whole.at + sum((here - first) * stride for here, first, stride in steps)
                return replace(whole, start=box.start, shape=box.shape, at=at)
        raise AssertionError((box, self.rectangles))

    def read(self, box: Box) -> Tensor:
        """Its elements, flat, as they are stored."""
        return self.at(box).load(self.values).reshape(-1).view(self.values.dtype)

    def write(self, box: Box, elements: Tensor) -> None:
        """The other way round."""
        assert isinstance(self.values, Tensor), "what is filled by a transfer lies in memory"
        assert elements.dtype == self.values.dtype, (elements.dtype, self.values.dtype)
        there = self.at(box).view(self.values)
        there.copy_(elements.view(there.dtype).view(box.shape))


class WeightTransfer:
    """The way of a model's weights from the stage `source` into `target`, of any other layout over the same
    ranks of `world`, found once. Collective.

    The source may train in any way in which all ranks have one model (ZeRO of any kind, experts, chunks,
    memory elsewhere); what modules keep besides goes, too, where the target's keep it as well. The target
    does not train, and its parameters lie in memory. HpctrainError where replicas are apart.
    """

    def __init__(
        self, world: World, source: Stage, target: Stage, bytes_at_a_time: int = BYTES_AT_A_TIME
    ) -> None:
        self._group, self._target = world.everyone, target
        if any(bucket.sharding.apart and bucket.sharding.replicas.size > 1 for bucket in source.buckets):
            raise HpctrainError(
                "layout.local_steps: weights cannot be transferred from replicas that diverge "
                "(use replicas = 1)"
            )
        self._having, self._wanting = dict(_held(source)), dict(_wanted(target))
        told = self._group.all_gather_object((_told(self._having), _told(self._wanting)))
        nodes = world.nodes_of(self._group.ranks)
        messages = _messages([each for each, _ in told], [each for _, each in told], nodes)
        own = self._group.rank
        self._kept = [
            each._replace(box=box)
            for each in messages
            if each.sender == each.receiver == own
            for box in each.box.cut(max(1, bytes_at_a_time // 8))
        ]
        types = {name: dtype for each, _ in told for name, (dtype, _) in each.items()}
        self._rounds: list[_TransferRound] = []
        for kind in dict.fromkeys(types.values()):
            dtype: torch.dtype = getattr(torch, kind)
            sent = [m for m in messages if m.sender != m.receiver and types[m.name] == kind]
            limit = max(1, bytes_at_a_time // dtype.itemsize)
            rounds = _in_rounds(sent, self._group.size, limit)
            self._rounds += [_TransferRound.of(each, dtype, own) for each in rounds]

    @property
    def sent_bytes(self) -> int:
        """That this rank sends to others, each time."""
        sent = ((each.box.elements, around.dtype) for around in self._rounds for each in around.sent)
        return sum(elements * dtype.itemsize for elements, dtype in sent)

    @torch.no_grad()
    def move(self) -> None:
        """Fill the target's parameters from the source's present ones. Collective."""
        await_readers(self._target.buckets)
        for each in self._kept:
            self._wanting[each.name].write(each.box, self._having[each.name].read(each.box))
        for around in self._rounds:
            around.run(self._group, self._having, self._wanting)
        refresh(self._target.buckets)


@dataclass(frozen=True)
class _TransferRound:
    """Messages of one round that this rank sends and receives, by peer."""

    dtype: torch.dtype
    sent: list[TransferMessage]
    received: list[TransferMessage]

    @staticmethod
    def of(messages: Sequence[TransferMessage], dtype: torch.dtype, rank: int) -> _TransferRound:
        """A rank's part in a round."""
        sent = sorted((each for each in messages if each.sender == rank), key=lambda each: each.receiver)
        got = sorted((each for each in messages if each.receiver == rank), key=lambda each: each.sender)
        return _TransferRound(dtype, sent, got)

    def run(
        self, group: Group, having: Mapping[str, TransferTensor], wanting: Mapping[str, TransferTensor]
    ) -> None:
        """Send and receive them."""
        sending, receiving = [0] * group.size, [0] * group.size
        for each in self.sent:
            sending[each.receiver] += each.box.elements
        for each in self.received:
            receiving[each.sender] += each.box.elements
        buffer = group.empty((sum(sending),), self.dtype)
        end = 0
        for each in self.sent:
            end += each.box.elements
            buffer[end - each.box.elements : end] = having[each.name].read(each.box)
        output = group.empty((sum(receiving),), self.dtype)
        group.all_to_all(buffer, output, sending, receiving)
        end = 0
        for each in self.received:
            end += each.box.elements
            wanting[each.name].write(each.box, output[end - each.box.elements : end])


def _held(stage: Stage) -> Iterator[tuple[str, TransferTensor]]:
    """What this rank has of all tensors, by name: all that it computes with, or with ZeRO-3 its slices."""
    for bucket in stage.buckets:
        for entry in _entries(bucket, whole=bucket.sharding.zero < 3):
            yield entry.dataset, TransferTensor.of(entry)
    yield from _of_modules(stage)


def _wanted(stage: Stage) -> Iterator[tuple[str, TransferTensor]]:
    """What it is to have."""
    for bucket in stage.buckets:
        for entry in _entries(bucket, whole=bucket.sharding.zero == 0, all_of_it=True):
            yield entry.dataset, TransferTensor.of(entry)
    yield from _of_modules(stage)


def _entries(bucket: Bucket, whole: bool, all_of_it: bool = False) -> Iterator[TensorRange]:
    """Of the whole values of a bucket, or of its own. Unless `all_of_it`, of slices of a table that lies on
    two stages only the first one's, as other places are cut on the second.
    """
    values: Flat | None = bucket.values if whole else bucket.own_values
    assert values is not None
    part = slice(0, bucket.length) if whole else bucket.own
    for segment, elements, offset in bucket.cut(values, part):
        if whole or all_of_it or segment.replication.written:
            shard = segment.parameter.shard
            yield TensorRange(f"{_MODEL}{shard.name}", shard, elements, offset)


def _of_modules(stage: Stage) -> Iterator[tuple[str, TransferTensor]]:
    for each in stage.modules.state():
        entry = TensorRange(f"/{each.kind}/{each.shard.name}", each.shard, each.values, each.offset)
        yield entry.dataset, TransferTensor.of(entry)


_Told = dict[str, tuple[str, list[tuple[Index, Index]]]]
"""The element type of tensors and a rank's boxes of them, by name."""


def _told(held: Mapping[str, TransferTensor]) -> _Told:
    return {
        name: (str(each.values.dtype).removeprefix("torch."), [(box.start, box.shape) for box in each.boxes])
        for name, each in held.items()
    }


def _messages(
    having: Sequence[_Told], wanting: Sequence[_Told], nodes: Sequence[int]
) -> list[TransferMessage]:
    """All that is to be sent, or stays, for each rank to have what it wants.

    Of those who have it, it comes from the rank itself, or else from one on its node, or else from any: from
    the one who sends least so far.
    """
    holders, receivers, sends = _by_box(having), _by_box(wanting), [0] * len(nodes)
    messages: list[TransferMessage] = []
    for name, boxes in receivers.items():
        if name not in holders:
            assert not name.startswith(_MODEL), name
            continue
        for box, ranks in boxes.items():
            every = ((box.common(each), have) for each, have in holders[name].items())
            parts = [(common, have) for common, have in every if common is not None]
            assert sum(part.elements for part, _ in parts) == box.elements, (name, box, parts)
            for receiver in ranks:
                for part, have in parts:
                    sender = receiver
                    if receiver not in have:
                        sender = min(have, key=lambda rank: (nodes[rank] != nodes[receiver], sends[rank]))
                        sends[sender] += part.elements
                    messages.append(TransferMessage(sender, receiver, name, part))
    return messages


def _by_box(told: Sequence[_Told]) -> dict[str, dict[Box, list[int]]]:
    """The ranks that have each box of each tensor."""
    found: dict[str, dict[Box, list[int]]] = {}
    for rank, tensors in enumerate(told):
        for name, (_, boxes) in tensors.items():
            for start, shape in boxes:
                found.setdefault(name, {}).setdefault(Box(tuple(start), tuple(shape)), []).append(rank)
    return found


def _in_rounds(messages: Sequence[TransferMessage], ranks: int, limit: int) -> list[list[TransferMessage]]:
    """Each message, cut where it is long, in the first round in which neither its sender nor its receiver has
    `limit` elements yet.
    """
    rounds: list[list[TransferMessage]] = []
    loads: list[tuple[list[int], list[int]]] = []
    first = [0] * ranks, [0] * ranks
    for message in messages:
        for box in message.box.cut(max(1, limit // 4)):
            ends = message.sender, message.receiver
            number = max(first[0][ends[0]], first[1][ends[1]])
            while number < len(rounds) and any(
                loads[number][way][end] >= limit for way, end in enumerate(ends)
            ):
                number += 1
            if number == len(rounds):
                rounds.append([])
                loads.append(([0] * ranks, [0] * ranks))
            rounds[number].append(message._replace(box=box))
            for way, end in enumerate(ends):
                loads[number][way][end] += box.elements
                while first[way][end] < len(rounds) and loads[first[way][end]][way][end] >= limit:
                    first[way][end] += 1
    return rounds
