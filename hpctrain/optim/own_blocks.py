"""A rank's own blocks of a parameter, with their state: whole ones, or pieces that it holds of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from hpctrain.optim.matrix_rule import Cells, MatrixRule
from hpctrain.optim.optimizer import ElementBatch
from hpctrain.optim.split_matrices import SplitMatrix
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketSegment
from hpctrain.sharding.state import MASTER, OPTIMIZER, StateTensor, segment_state


@dataclass(frozen=True)
class OwnBlocks:
    """This rank's own blocks of a parameter: from its number `first` on `count`, of shape `local` each here.

    `span` are their elements, of all its own in the bucket. `state` are flat tensors by name, with values of
    elements or, where `cells` says so, of cells. Where ranks hold pieces of a block, `cut` says which.
    """

    bucket: Bucket
    segment: BucketSegment
    span: slice
    first: int
    count: int
    local: tuple[int, ...]
    state: Mapping[str, Tensor]
    cells: Mapping[str, Cells]
    cut: SplitMatrix | None

    @staticmethod
    def of(rule: MatrixRule, bucket: Bucket, segment: BucketSegment, master: Tensor) -> OwnBlocks:
        """Collective over the ranks that hold pieces of it."""
        shard, block = segment.parameter.shard, segment.parameter.block
        assert block is not None
        own, elements = bucket.own, block.elements(shard)
        start = min(max(segment.start, own.start), own.stop)
        # Of a piece that is longer than the whole tensor what fills it up is nobody's.
        length = prod(shard.held) if shard.is_longer else segment.length
        stop = max(start, min(segment.start + length, own.stop))
        count, rest = divmod(stop - start, elements)
        assert not rest, f"{shard.name}: a block is cut"
        span = slice(start - own.start, stop - own.start)
        state, cells = {MASTER: master[span]}, {}
        for name, cell in rule.cells(shard).items():
            numbers = elements
            if cell is not None:
                cells[name] = Cells.of(shard, block, cell)
                numbers = prod(cells[name].of_block)
            state[name] = torch.zeros(count * numbers, device=master.device)
        return OwnBlocks(
            bucket,
            segment,
            span,
            (start - segment.start) // elements if count else 0,
            count,
            block.local(shard),
            state,
            cells,
            SplitMatrix.of(segment, block),
        )

    @property
    def divided(self) -> bool:
        """Whether the ranks that hold pieces divide them among themselves: those whose cells' state all have
        are joined by all.
        """
        return self.cut is not None and not self.cells

    @property
    def handed(self) -> bool:
        """Whether all ranks of the bucket's group have them, and hand each other what comes of them: if
        otherwise each transformed all of them, and no state of theirs is to follow.
        """
        sharding = self.bucket.sharding
        return sharding.zero == 0 and sharding.group.size > 1 and not self.cells

    def working_bytes(self, rule: MatrixRule) -> int:
        """Memory that one block takes in passing, where it is divided without that of the Division."""
        block = self.segment.parameter.block
        assert block is not None
        if not self.count or not self.segment.parameter.requires_grad:
            return 0
        elements = prod(self.local)
        copied = elements * 4 * (self.bucket.gradient_dtype != torch.float32)
        if self.divided:
            return self.direction_bytes
        joined = 0 if self.cut is None else self.cut.group.size * elements + prod(block.shape)
        return (elements + joined) * rule.format.itemsize + copied + rule.working_bytes(block.shape)

    @property
    def direction_bytes(self) -> int:
        """Memory of the directions of one, in fp32, and of gradients of another type."""
        return prod(self.local) * 4 * (1 + (self.bucket.gradient_dtype != torch.float32))

    def update(self, rule: MatrixRule, updates: float, learning_rate: float, gradient_divisor: float) -> None:
        """Update all of them. Collective over the ranks that hold pieces."""
        for number in range(self.count):
            part = self.part(number, updates)
            directions = self.transformed(rule, number, rule.direction(single(part), gradient_divisor))
            rule.follow(part, directions, learning_rate)

    def transformed(self, rule: MatrixRule, number: int, directions: Tensor) -> Tensor:
        """This rank's piece of what comes of a block. Collective over the ranks that hold pieces."""
        cells = {name: self._one(self.state[name], number, self._shape(name)) for name in self.cells}
        directions = directions.to(rule.format)
        if self.cut is None:
            return rule.transformed(directions, cells)
        return self.cut.take(rule.transformed(self.cut.join(directions), cells))

    def rehearse(self, rule: MatrixRule) -> None:
        """Have pieces be joined as often as an update does, without values."""
        if self.cut is not None and not self.divided:
            piece = torch.empty(self.local, dtype=rule.format, device=self.state[MASTER].device)
            for _ in range(self.count):
                self.cut.join(piece)

    def place(self, number: int) -> slice:
        """The elements of a block of its own, of all those of the bucket."""
        start = self.bucket.own.start + self.span.start + number * prod(self.local)
        return slice(start, start + prod(self.local))

    def owned(self, number: int) -> bool:
        """Whether this rank is the one to transform it: all its own, but where all ranks have it."""
        place, share = self.place(number), self.bucket.slice
        return not self.handed or share.start <= place.start < share.stop

    def part(self, number: int, updates: float) -> ElementBatch:
        """This rank's piece of a block, with state of elements and its gradients as they lie."""
        gradients = self.bucket.own_gradients[self.span]
        return ElementBatch(
            {
                name: self._one(flat, number, self.local)
                for name, flat in self.state.items()
                if name not in self.cells
            },
            self._one(gradients, number, self.local),
            torch.full((), updates, device=gradients.device),
            self.segment.parameter.treatment,
            self.segment.parameter.shard,
        )

    def state_tensors(self) -> Iterator[StateTensor]:
        """All but the weights."""
        shard = self.segment.parameter.shard
        for name, flat in self.state.items():
            if name == MASTER:
                continue
            kind, in_cells = f"{OPTIMIZER}{name}", name in self.cells
            each = prod(self._shape(name))
            shape = self.cells[name].shard if in_cells else shard
            joined = self.cut.group if in_cells and self.cut is not None else None
            yield segment_state(
                kind,
                self.segment,
                flat,
                self.first * each,
                self.bucket,
                "always",
                False,
                shape=shape,
                joined=joined,
            )

    def _shape(self, name: str) -> tuple[int, ...]:
        """That of one block's state."""
        return self.cells[name].of_block if name in self.cells else self.local

    def _one(self, flat: Tensor, number: int, shape: Sequence[int]) -> Tensor:
        elements = prod(shape)
        return flat[number * elements : (number + 1) * elements].view(torch.Size(shape))


def single(part: ElementBatch) -> ElementBatch:
    """The same with gradients in fp32."""
    return replace(part, gradients=part.gradients.float())
