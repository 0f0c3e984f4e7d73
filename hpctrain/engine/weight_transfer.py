"""Transfer of weights between two layouts on the same ranks without a file, such as training and generation.

Each rank sends all ranks the boxes (rectangular parts of tensors) that it holds and those that it needs. From
these all ranks compute the same plan: which rank sends which box to which rank, in rounds of bounded size. So
no rank needs more memory than its two stages and one round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.checkpoint.tensor_ranges import Index, TensorBox, TensorRange, boxes_of
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.engine.stages.stage import Stage
from hpctrain.errors import HpctrainError
from hpctrain.memory.scratch import Flat
from hpctrain.optim.optimizer import gather_updated
from hpctrain.sharding.bucket import Bucket, await_readers
from hpctrain.sharding.state import MODEL

BYTES_AT_A_TIME = 64 << 20
"""Approximate number of bytes that a rank sends or receives in one round."""

_MODEL = f"/{MODEL}/"


class Box(NamedTuple):
    """Rectangular part of a global tensor."""

    start: Index
    shape: Index

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def common(self, other: Box) -> Box | None:
        """Return the intersection of two boxes, or None if it is empty."""
        both = list(zip(self.start, self.shape, other.start, other.shape, strict=True))
        start = tuple(max(a, b) for a, _, b, _ in both)
        shape = tuple(min(a + n, b + m) - first for (a, n, b, m), first in zip(both, start, strict=True))
        return Box(start, shape) if min(shape) > 0 else None

    def cut(self, limit: int) -> Iterator[Box]:
        """Yield the box in pieces of at most `limit` elements."""
        for part in TensorBox(self.start, self.shape, 0, (0,) * len(self.shape)).cut(limit):
            yield Box(part.start, part.shape)


class TransferMessage(NamedTuple):
    """Box of a tensor that one rank sends to another one, or copies locally if both are the same."""

    sender: int
    receiver: int
    name: str
    box: Box


@dataclass(frozen=True)
class TransferTensor:
    """Elements of a tensor that a rank holds, as rectangles.

    Attributes:
        values: Flat memory of the elements.
        rectangles: Place of each rectangle in the global tensor and in `values`.
    """

    values: Flat
    rectangles: list[TensorBox]

    @staticmethod
    def of(entry: TensorRange) -> TransferTensor:
        """Return the elements of a TensorRange without padding."""
        return TransferTensor(entry.values, boxes_of(entry))

    @property
    def boxes(self) -> list[Box]:
        """Boxes of the rectangles."""
        return [Box(each.start, each.shape) for each in self.rectangles]

    def at(self, box: Box) -> TensorBox:
        """Return where a box lies in `values`: its place and strides, without data.

        The box must be inside of one of the rectangles.
        """
        for rectangle in self.rectangles:
            if Box(rectangle.start, rectangle.shape).common(box) == box:
                steps = zip(box.start, rectangle.start, rectangle.strides, strict=True)
                at = rectangle.at + sum((index - first) * stride for index, first, stride in steps)
                return replace(rectangle, start=box.start, shape=box.shape, at=at)
        raise AssertionError((box, self.rectangles))

    def read(self, box: Box) -> Tensor:
        """Return the elements of a box, flat, in their dtype."""
        return self.at(box).load(self.values).reshape(-1).view(self.values.dtype)

    def write(self, box: Box, elements: Tensor) -> None:
        """Overwrite the elements of a box with flat elements of the same dtype."""
        assert isinstance(self.values, Tensor), "the target of a transfer is in memory"
        assert elements.dtype == self.values.dtype, (elements.dtype, self.values.dtype)
        target = self.at(box).view(self.values)
        target.copy_(elements.view(target.dtype).view(box.shape))


class WeightTransfer:
    """Plan by which the weights of a stage move into a stage with another layout on the same ranks.

    The source may have any layout in which all ranks share one model: ZeRO, experts, chunks, offloaded
    memory. State of modules moves as well if the target has it. The target does not train, and its parameters
    are in memory.
    """

    def __init__(
        self, world: World, source: Stage, target: Stage, bytes_at_a_time: int = BYTES_AT_A_TIME
    ) -> None:
        """Plan the transfer. Collective over the world.

        Args:
            world: Ranks of both stages.
            source: Stage with the weights.
            target: Stage to fill.
            bytes_at_a_time: Bytes of a round.

        Raises:
            HpctrainError: On all ranks if the replicas of the source diverge.
        """
        self._group, self._target = world.everyone, target
        if any(bucket.sharding.diverging and bucket.sharding.replicas.size > 1 for bucket in source.buckets):
            raise HpctrainError(
                "layout.local_steps: weights cannot be transferred from replicas that diverge "
                "(use replicas = 1)"
            )
        self._source_tensors, self._target_tensors = dict(_sources(source)), dict(_targets(target))
        boxes = self._group.all_gather_object(
            (_boxes_of(self._source_tensors), _boxes_of(self._target_tensors))
        )
        nodes = world.nodes_of(self._group.ranks)
        messages = _messages([each for each, _ in boxes], [each for _, each in boxes], nodes)
        rank = self._group.rank
        self._local_messages = [
            each._replace(box=box)
            for each in messages
            if each.sender == each.receiver == rank
            for box in each.box.cut(max(1, bytes_at_a_time // 8))
        ]
        types = {name: dtype for each, _ in boxes for name, (dtype, _) in each.items()}
        self._rounds: list[_TransferRound] = []
        for kind in dict.fromkeys(types.values()):
            dtype: torch.dtype = getattr(torch, kind)
            sent = [m for m in messages if m.sender != m.receiver and types[m.name] == kind]
            limit = max(1, bytes_at_a_time // dtype.itemsize)
            rounds = _divide_into_rounds(sent, self._group.size, limit)
            self._rounds += [_TransferRound.of(each, dtype, rank) for each in rounds]

    @torch.no_grad()
    def move(self) -> None:
        """Copy the current weights of the source into the target. Collective over the world."""
        await_readers(self._target.buckets)
        for each in self._local_messages:
            elements = self._source_tensors[each.name].read(each.box)
            self._target_tensors[each.name].write(each.box, elements)
        for each_round in self._rounds:
            each_round.run(self._group, self._source_tensors, self._target_tensors)
        gather_updated(self._target.buckets)


@dataclass(frozen=True)
class _TransferRound:
    """Messages of one round that this rank sends and receives, sorted by peer."""

    dtype: torch.dtype
    sent_messages: list[TransferMessage]
    received_messages: list[TransferMessage]

    @staticmethod
    def of(messages: Sequence[TransferMessage], dtype: torch.dtype, rank: int) -> _TransferRound:
        """Return the messages of a round that a rank takes part in."""
        sent = sorted((each for each in messages if each.sender == rank), key=lambda each: each.receiver)
        received = sorted((each for each in messages if each.receiver == rank), key=lambda each: each.sender)
        return _TransferRound(dtype, sent, received)

    def run(
        self, group: Group, sources: Mapping[str, TransferTensor], targets: Mapping[str, TransferTensor]
    ) -> None:
        """Send and receive the messages. Collective over the group."""
        sending, receiving = [0] * group.size, [0] * group.size
        for each in self.sent_messages:
            sending[each.receiver] += each.box.elements
        for each in self.received_messages:
            receiving[each.sender] += each.box.elements
        buffer = group.empty((sum(sending),), self.dtype)
        end = 0
        for each in self.sent_messages:
            end += each.box.elements
            buffer[end - each.box.elements : end] = sources[each.name].read(each.box)
        output = group.empty((sum(receiving),), self.dtype)
        group.all_to_all(buffer, output, sending, receiving)
        end = 0
        for each in self.received_messages:
            end += each.box.elements
            targets[each.name].write(each.box, output[end - each.box.elements : end])


def _sources(stage: Stage) -> Iterator[tuple[str, TransferTensor]]:
    """Yield this rank's elements of all tensors by name: all that it computes with, or its ZeRO-3 slices."""
    for bucket in stage.buckets:
        for entry in _entries(bucket, gathered=bucket.sharding.zero < 3):
            yield entry.dataset, TransferTensor.of(entry)
    yield from _module_tensors(stage)


def _targets(stage: Stage) -> Iterator[tuple[str, TransferTensor]]:
    """Yield the elements that this rank needs of all tensors, by name."""
    for bucket in stage.buckets:
        for entry in _entries(bucket, gathered=bucket.sharding.zero == 0, both_stages=True):
            yield entry.dataset, TransferTensor.of(entry)
    yield from _module_tensors(stage)


def _entries(bucket: Bucket, gathered: bool, both_stages: bool = False) -> Iterator[TensorRange]:
    """Yield the parameters of a bucket.

    Args:
        bucket: The bucket.
        gathered: True for all of its elements, False for those that this rank updates.
        both_stages: True to include the slices of the second stage of a tied embedding, which two stages hold
            and shard in different places.
    """
    values: Flat | None = bucket.values if gathered else bucket.owned_values
    assert values is not None
    part = slice(0, bucket.length) if gathered else bucket.owned_slice
    for segment, elements, offset in bucket.segments_within(values, part):
        if gathered or both_stages or segment.replication.writes_checkpoint:
            shard = segment.parameter.shard
            yield TensorRange(f"{_MODEL}{shard.name}", shard, elements, offset)


def _module_tensors(stage: Stage) -> Iterator[tuple[str, TransferTensor]]:
    for each in stage.module_state.state():
        entry = TensorRange(f"/{each.kind}/{each.shard.name}", each.shard, each.values, each.offset)
        yield entry.dataset, TransferTensor.of(entry)


_RankBoxes = dict[str, tuple[str, list[tuple[Index, Index]]]]
"""Type of the elements of tensors, and a rank's boxes of them, by name."""


def _boxes_of(tensors: Mapping[str, TransferTensor]) -> _RankBoxes:
    return {
        name: (str(each.values.dtype).removeprefix("torch."), [(box.start, box.shape) for box in each.boxes])
        for name, each in tensors.items()
    }


def _messages(
    sources: Sequence[_RankBoxes], targets: Sequence[_RankBoxes], nodes: Sequence[int]
) -> list[TransferMessage]:
    """Return the messages that give each rank all its boxes.

    A box comes from the rank itself if it holds it, or else from a rank on its node, or else from any rank:
    among several, from the one that sends the least so far.

    Args:
        sources: Boxes that each rank holds.
        targets: Boxes that each rank needs.
        nodes: Node of each rank.
    """
    holders, receivers, sends = _by_box(sources), _by_box(targets), [0] * len(nodes)
    messages: list[TransferMessage] = []
    for name, boxes in receivers.items():
        if name not in holders:
            assert not name.startswith(_MODEL), name
            continue
        for box, ranks in boxes.items():
            common_boxes = ((box.common(each), have) for each, have in holders[name].items())
            parts = [(common, have) for common, have in common_boxes if common is not None]
            assert sum(part.elements for part, _ in parts) == box.elements, (name, box, parts)
            for receiver in ranks:
                for part, have in parts:
                    sender = receiver
                    if receiver not in have:
                        sender = min(have, key=lambda rank: (nodes[rank] != nodes[receiver], sends[rank]))
                        sends[sender] += part.elements
                    messages.append(TransferMessage(sender, receiver, name, part))
    return messages


def _by_box(boxes_of_ranks: Sequence[_RankBoxes]) -> dict[str, dict[Box, list[int]]]:
    """Return the ranks with each box of each tensor."""
    ranks: dict[str, dict[Box, list[int]]] = {}
    for rank, tensors in enumerate(boxes_of_ranks):
        for name, (_, boxes) in tensors.items():
            for start, shape in boxes:
                ranks.setdefault(name, {}).setdefault(Box(tuple(start), tuple(shape)), []).append(rank)
    return ranks


def _divide_into_rounds(
    messages: Sequence[TransferMessage], ranks: int, limit: int
) -> list[list[TransferMessage]]:
    """Return messages in rounds. Long messages are cut.

    Each piece is in the first round in which neither its sender nor its receiver has `limit` elements yet.
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
