"""Blocks that all ranks of a group have, without ZeRO: each transforms its share, and hands it on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from hpctrain.comm.work import Work
from hpctrain.optim.divided_blocks import DividedBlocks
from hpctrain.optim.matrix_rule import MatrixRule
from hpctrain.optim.optimizer import ElementBatch
from hpctrain.optim.own_blocks import OwnBlocks, single
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import UpdateRange


class HandedBlocks:
    """Blocks of a bucket that all ranks of its group have, and each of them transforms its share of, to hand
    what comes of it to the others.
    """

    def __init__(
        self, rule: MatrixRule, bucket: Bucket, treated: UpdateRange, blocks: Sequence[OwnBlocks]
    ) -> None:
        self.rule, self.bucket, self.blocks, self.part = rule, bucket, blocks, treated.part
        borders = [min(max(each, self.part.start), self.part.stop) for each in bucket.layout.borders]
        self._sizes = [last - first for first, last in pairwise(borders)]
        first, last = (each - self.part.start for each in borders[bucket.sharding.group.rank :][:2])
        self._own = slice(first, last)
        self.divided = DividedBlocks.all_of(rule, blocks)
        self._parts: list[tuple[OwnBlocks, int, ElementBatch]] = []
        self._work: Work[Tensor] | None = None

    @property
    def bytes(self) -> int:
        """Memory of what comes of all of them."""
        elements: int = self.part.stop - self.part.start
        return elements * self.rule.format.itemsize

    def empty(self) -> Tensor:
        """That memory."""
        group = self.bucket.sharding.group
        return group.empty((self.part.stop - self.part.start,), self.rule.format)

    def hand(self, flat: Tensor) -> Work[Tensor]:
        """Start to hand this rank's share to the others."""
        return self.bucket.sharding.group.start_all_gather(flat[self._own], flat, self._sizes)

    def start(self, updates: float, gradient_divisor: float) -> None:
        """Transform what is this rank's, and start to hand it to the others."""
        flat = self.empty()

        def take(blocks: OwnBlocks, number: int, directions: Tensor) -> None:
            flat[self._place(blocks, number)].view(blocks.local).copy_(directions)

        for blocks in self.blocks:
            for number in range(blocks.count):
                part = blocks.part(number, updates)
                self._parts.append((blocks, number, part))
                if blocks.divided and blocks.owned(number):
                    continue
                directions = self.rule.direction(single(part), gradient_divisor)
                if blocks.owned(number):
                    take(blocks, number, blocks.transformed(self.rule, number, directions))
        for divided in self.divided:
            divided.transform(updates, gradient_divisor, take)
        self._work = self.hand(flat)

    def finish(self, learning_rate: float) -> None:
        """Update with what all have handed."""
        assert self._work is not None
        flat = self._work.wait()
        for blocks, number, part in self._parts:
            self.rule.follow(part, flat[self._place(blocks, number)].view(blocks.local), learning_rate)
        self._parts.clear()
        self._work = None

    def _place(self, blocks: OwnBlocks, number: int) -> slice:
        place = blocks.place(number)
        return slice(place.start - self.part.start, place.stop - self.part.start)
