"""Rules that update parameters in blocks, such as whole matrices, and the optimizer that has them do so.

ZeRO cuts no block: its elements are all one rank's (`sharding/ownership.py`), which has their sums of
gradients, updates them, and hands them back to the others as it does with any slice. What the ranks of the
axis "tensor" hold in pieces they join, or divide among themselves (`cut_blocks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.work import Work
from hpctrain.optim.cut_blocks import CutBlock, Division
from hpctrain.optim.optimizer import Elements, Optimizer, UpdateRule, is_master
from hpctrain.parallel.shard import Block, Parameter, Shard, Treatment
from hpctrain.sharding.bucket import Bucket
from hpctrain.sharding.bucket_layout import BucketSegment, Treated
from hpctrain.sharding.state import MASTER, OPTIMIZER, StateTensor, segment_state


class BlockRule(Protocol):
    """How what is a Block is updated, in three steps: by element, of the whole block, and by element again.

    So a rule sees whole matrices where ranks hold pieces of them, and these keep state of their own pieces.
    """

    def block(self, shard: Shard) -> Block | None:
        """The Blocks of a parameter; None where this rule is not for it."""

    def cells(self, shard: Shard) -> Mapping[str, Sequence[int] | None]:
        """The state beside master weights of a parameter, which begins as zeros, by name.

        None is a number for each element. Others have one for each cell of such a shape, as many dims as the
        parameter's: of a block [n, m] one a row with (1, m). Cells fill blocks, but for the last ones.
        """

    def working_bytes(self, shape: Sequence[int]) -> int:
        """Memory that `transformed` needs in passing, of a block of this shape, beside what it is given."""

    @property
    def format(self) -> torch.dtype:
        """Of what is joined, and of what comes of it."""

    def direction(self, part: Elements, gradient_divisor: float) -> Tensor:
        """What is to be joined, of a piece of a block in its shape, with state of elements, which is updated.
        The gradients are divided by `gradient_divisor`, and stay so.
        """

    def transformed(self, directions: Tensor, cells: Mapping[str, Tensor]) -> Tensor:
        """What comes of a whole block's directions, which may be overwritten, in its shape; with the state of
        its cells, which is updated.
        """

    def follow(self, part: Elements, directions: Tensor, learning_rate: float) -> None:
        """Update the weights of a piece of a block with what came of it."""


@dataclass(frozen=True)
class BlockRules:
    """A rule for the Blocks of parameters that `patterns` name, and one for the elements of all others, whose
    learning rate is `others_rate` times that of the step.
    """

    blocks: BlockRule
    elements: UpdateRule
    patterns: Sequence[str]
    others_rate: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the state of parameters beside master weights."""
        return (*self.elements.names, *self.blocks.cells(Shard.whole("", (1, 1))))

    def numbers(self, treatment: Treatment) -> int:
        """Of state beside weights that an element has which is treated so, without that of cells."""
        if not treatment.in_blocks:
            return len(self.elements.names)
        return sum(cell is None for cell in self.blocks.cells(Shard.whole("", (1, 1))).values())

    def cell_numbers(self, parameter: Parameter, elements: int) -> int:
        """Of state of cells that so many elements of a parameter, in whole blocks, have."""
        shard, block = parameter.shard, parameter.block
        if block is None:
            return 0
        cells = (cell for cell in self.blocks.cells(shard).values() if cell is not None)
        each = sum(prod(_cells_of(shard, block, cell).of_block) for cell in cells)
        return elements // block.elements(shard) * each

    def assign(self, parameters: Sequence[Parameter]) -> None:
        """Have parameters be updated in blocks."""
        for parameter in parameters:
            if any(fnmatchcase(parameter.shard.name, pattern) for pattern in self.patterns):
                parameter.block = self.blocks.block(parameter.shard)


class BlockOptimizer(Optimizer):
    """Keeps the state where it is updated. What is not trained stays as it is."""

    def __init__(self, rules: BlockRules, buckets: Sequence[Bucket]) -> None:
        """Collective."""
        masters = [_master(bucket) for bucket in buckets]
        super().__init__(rules.elements, buckets, [{MASTER: master} for master in masters])
        self.updates = 0
        self._rules = rules
        self._runs: list[_Run] = []
        self._blocks: list[_Blocks] = []
        self._handed: list[_Handed] = []
        alone: list[_Blocks] = []
        for bucket, master in zip(buckets, masters, strict=True):
            for treated in bucket.layout.treated:
                if treated.treatment.in_blocks:
                    segments = _within(bucket, treated)
                    blocks = [_Blocks.of(rules.blocks, bucket, each, master) for each in segments]
                    self._blocks += blocks
                    trained = [each for each in blocks if each.segment.parameter.requires_grad]
                    if trained and _Handed.worth(bucket, trained):
                        self._handed.append(_Handed(rules.blocks, bucket, treated, trained))
                    else:
                        alone += trained
                else:
                    self._runs.append(_Run.of(rules.elements, bucket, treated, master))
        self._alone = [each for each in alone if not each.divided]
        self._divided = _Divided.all_of(rules.blocks, alone)

    @property
    def working_bytes(self) -> int:
        """Host memory that pieces of a block are joined in, blocks are handed to others in, and gradients of
        another type copied.
        """
        handed = sum(sorted(each.bytes for each in self._handed)[-2:])
        runs = (run.elements * 4 for run in self._runs if run.bucket.gradient_dtype != torch.float32)
        blocks = (each.working_bytes(self._rules.blocks) for each in self._blocks)
        everywhere = [*self._divided, *(divided for each in self._handed for divided in each.divided)]
        return max((*runs, *blocks, *(each.working_bytes for each in everywhere)), default=0) + handed

    def step(self, learning_rate: float, gradient_divisor: float) -> None:
        """See Optimizer."""
        updates = float(self.updates)
        together = (
            [[run for run in self._runs if run.elements]]
            if all(bucket.gradient_dtype == torch.float32 for bucket in self.buckets)
            else [[run] for run in self._runs if run.elements]
        )
        for runs in together:
            parts = [run.part(updates) for run in runs]
            if parts:
                self.rule.update(parts, learning_rate * self._rules.others_rate, gradient_divisor)
            del parts
        for blocks in self._alone:
            blocks.update(self._rules.blocks, updates, learning_rate, gradient_divisor)
        for divided in self._divided:
            divided.update(updates, learning_rate, gradient_divisor)
        # While the others' blocks are under way, this rank transforms its next ones.
        under_way: _Handed | None = None
        for handed in self._handed:
            handed.start(updates, gradient_divisor)
            if under_way is not None:
                under_way.finish(learning_rate)
            under_way = handed
        if under_way is not None:
            under_way.finish(learning_rate)
        self.updates += 1
        self.publish()

    def rehearse(self) -> None:
        """See Optimizer."""
        for blocks in self._blocks:
            if blocks.segment.parameter.requires_grad:
                blocks.rehearse(self._rules.blocks)
        for divided in self._divided:
            divided.division.rehearse()
        for handed in self._handed:
            for divided in handed.divided:
                divided.division.rehearse()
            handed.hand(handed.empty()).wait()

    def state(self) -> Iterator[StateTensor]:
        """See Optimizer."""
        yield from super().state()
        for run in self._runs:
            yield from run.state_tensors()
        for blocks in self._blocks:
            yield from blocks.state_tensors()


@dataclass(frozen=True)
class _Run:
    """Neighbouring elements of one bucket that are updated by themselves, and this rank's own of them: `span`
    of all its own.
    """

    bucket: Bucket
    treated: Treated
    span: slice
    state: Mapping[str, Tensor]

    @staticmethod
    def of(rule: UpdateRule, bucket: Bucket, treated: Treated, master: Tensor) -> _Run:
        own = bucket.own
        first = min(max(treated.part.start, own.start), own.stop)
        span = slice(first - own.start, max(first, min(treated.part.stop, own.stop)) - own.start)
        weights = master[span]
        state = {name: torch.zeros(weights.shape, device=weights.device) for name in rule.names}
        return _Run(bucket, treated, span, {MASTER: weights} | state)

    @property
    def elements(self) -> int:
        return self.state[MASTER].numel()

    def part(self, updates: float) -> Elements:
        gradients = self.bucket.own_gradients[self.span].float()
        count = torch.tensor(updates, device=gradients.device)
        return Elements(self.state, gradients, count, self.treated.treatment)

    def state_tensors(self) -> Iterator[StateTensor]:
        start = self.bucket.own.start
        part = slice(self.span.start + start, self.span.stop + start)
        held = {segment.start for segment in _within(self.bucket, self.treated)}
        for name, flat in self.state.items():
            for segment, values, offset in self.bucket.cut(flat, part):
                if name != MASTER and segment.start in held:
                    kind = f"{OPTIMIZER}{name}"
                    yield segment_state(kind, segment, values, offset, self.bucket, "always", False)


class _Cells(NamedTuple):
    """State with a number for each cell: the Shard of its tensor, and a block's shape in it."""

    shard: Shard
    of_block: tuple[int, ...]


@dataclass(frozen=True)
class _Blocks:
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
    cells: Mapping[str, _Cells]
    cut: CutBlock | None

    @staticmethod
    def of(rule: BlockRule, bucket: Bucket, segment: BucketSegment, master: Tensor) -> _Blocks:
        """Collective over the ranks that hold pieces of it."""
        shard, block = segment.parameter.shard, segment.parameter.block
        assert block is not None
        own, elements = bucket.own, block.elements(shard)
        start = min(max(segment.start, own.start), own.stop)
        stop = max(start, min(segment.start + segment.length, own.stop))
        count, rest = divmod(stop - start, elements)
        assert not rest, f"{shard.name}: a block is cut"
        span = slice(start - own.start, stop - own.start)
        state, cells = {MASTER: master[span]}, {}
        for name, cell in rule.cells(shard).items():
            numbers = elements
            if cell is not None:
                cells[name] = _cells_of(shard, block, cell)
                numbers = prod(cells[name].of_block)
            state[name] = torch.zeros(count * numbers, device=master.device)
        return _Blocks(
            bucket,
            segment,
            span,
            (start - segment.start) // elements if count else 0,
            count,
            tuple(min(size, held) for size, held in zip(block.shape, shard.local, strict=True)),
            state,
            cells,
            CutBlock.of(segment, block),
        )

    @property
    def divided(self) -> bool:
        """Whether the ranks that hold pieces divide them among themselves: those whose cells' state all have
        are joined by all.
        """
        return self.cut is not None and not self.cells

    def working_bytes(self, rule: BlockRule) -> int:
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

    def update(self, rule: BlockRule, updates: float, learning_rate: float, gradient_divisor: float) -> None:
        """Update all of them. Collective over the ranks that hold pieces."""
        for number in range(self.count):
            part = self.part(number, updates)
            directions = self.transformed(rule, number, rule.direction(single(part), gradient_divisor))
            rule.follow(part, directions, learning_rate)

    def transformed(self, rule: BlockRule, number: int, directions: Tensor) -> Tensor:
        """This rank's piece of what comes of a block. Collective over the ranks that hold pieces."""
        cells = {name: self._one(self.state[name], number, self._shape(name)) for name in self.cells}
        directions = directions.to(rule.format)
        if self.cut is None:
            return rule.transformed(directions, cells)
        return self.cut.take(rule.transformed(self.cut.join(directions), cells))

    def rehearse(self, rule: BlockRule) -> None:
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
        handed = _Handed.worth(self.bucket, [self])
        return not handed or share.start <= place.start < share.stop

    def part(self, number: int, updates: float) -> Elements:
        """This rank's piece of a block, with state of elements and its gradients as they lie."""
        gradients = self.bucket.own_gradients[self.span]
        return Elements(
            {
                name: self._one(flat, number, self.local)
                for name, flat in self.state.items()
                if name not in self.cells
            },
            self._one(gradients, number, self.local),
            torch.tensor(updates, device=gradients.device),
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
        return flat[number * elements : (number + 1) * elements].view(*shape)


class _Handed:
    """Blocks of a bucket that all ranks of its group have, and each of them transforms its share of, to hand
    what comes of it to the others.
    """

    def __init__(self, rule: BlockRule, bucket: Bucket, treated: Treated, blocks: Sequence[_Blocks]) -> None:
        self.rule, self.bucket, self.blocks, self.part = rule, bucket, blocks, treated.part
        borders = [min(max(each, self.part.start), self.part.stop) for each in bucket.layout.borders]
        self._sizes = [last - first for first, last in pairwise(borders)]
        first, last = (each - self.part.start for each in borders[bucket.sharding.group.rank :][:2])
        self._own = slice(first, last)
        self.divided = _Divided.all_of(rule, blocks)
        self._parts: list[tuple[_Blocks, int, Elements]] = []
        self._work: Work[Tensor] | None = None

    @staticmethod
    def worth(bucket: Bucket, blocks: Sequence[_Blocks]) -> bool:
        """Whether ranks hand each other what comes of blocks: if otherwise each transformed all of them, and
        no state of theirs is to follow.
        """
        sharding = bucket.sharding
        return sharding.zero == 0 and sharding.group.size > 1 and not any(each.cells for each in blocks)

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

        def take(blocks: _Blocks, number: int, directions: Tensor) -> None:
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

    def _place(self, blocks: _Blocks, number: int) -> slice:
        place = blocks.place(number)
        return slice(place.start - self.part.start, place.stop - self.part.start)


@dataclass(frozen=True)
class _Divided:
    """Blocks that this rank is to see transformed and `numbers` theirs, which the ranks that hold pieces of
    them divide among themselves.
    """

    rule: BlockRule
    blocks: Sequence[tuple[_Blocks, int]]
    division: Division

    @staticmethod
    def all_of(rule: BlockRule, blocks: Sequence[_Blocks]) -> list[_Divided]:
        """One for each group of ranks that hold pieces. Collective over these."""
        found: dict[Group, list[tuple[_Blocks, int, CutBlock]]] = {}
        for each in blocks:
            if each.cut is not None and each.divided:
                numbers = [number for number in range(each.count) if each.owned(number)]
                found.setdefault(each.cut.group, []).extend((each, number, each.cut) for number in numbers)
        made = []
        for group, of_group in found.items():
            names = [[each.segment.parameter.shard.name, each.first + number] for each, number, _ in of_group]
            division = Division(group, [cut for _, _, cut in of_group], names, rule.format)
            made.append(_Divided(rule, [(each, number) for each, number, _ in of_group], division))
        return made

    @property
    def working_bytes(self) -> int:
        """Memory that they take in passing."""
        return self.division.working_bytes(
            lambda index: self.blocks[index][0].direction_bytes,
            lambda index: self.rule.working_bytes(self.division.blocks[index].shape),
        )

    def update(self, updates: float, learning_rate: float, gradient_divisor: float) -> None:
        """Update all of them. Collective."""

        def follow(blocks: _Blocks, number: int, directions: Tensor) -> None:
            self.rule.follow(blocks.part(number, updates), directions, learning_rate)

        self.transform(updates, gradient_divisor, follow)

    def transform(
        self, updates: float, gradient_divisor: float, follow: Callable[[_Blocks, int, Tensor], None]
    ) -> None:
        """Have `follow` use this rank's piece of what comes of each. Collective."""

        def directions(index: int) -> Tensor:
            blocks, number = self.blocks[index]
            return self.rule.direction(single(blocks.part(number, updates)), gradient_divisor)

        self.division.run(
            directions,
            lambda _, whole: self.rule.transformed(whole, {}),
            lambda index, piece: follow(*self.blocks[index], piece),
        )


def single(part: Elements) -> Elements:
    """The same with gradients in fp32."""
    return replace(part, gradients=part.gradients.float())


def _cells_of(shard: Shard, block: Block, cell: Sequence[int]) -> _Cells:
    """State with a number for each cell of a parameter's blocks, which pieces of one block all have whole."""
    of_block = tuple(-(-size // each) for size, each in zip(block.shape, cell, strict=True))

    def blocks(elements: Sequence[int]) -> list[int]:
        return [-(-number // size) for number, size in zip(elements, block.shape, strict=True)]

    def numbers(elements: Sequence[int]) -> tuple[int, ...]:
        return tuple(count * each for count, each in zip(blocks(elements), of_block, strict=True))

    start = tuple(
        at // size * each for at, size, each in zip(shard.start, block.shape, of_block, strict=True)
    )
    split = shard.split if blocks(shard.local) != blocks(shard.shape) else frozenset[str]()
    own = replace(shard, shape=numbers(shard.shape), start=start, local=numbers(shard.local), split=split)
    return _Cells(own, of_block)


def _within(bucket: Bucket, treated: Treated) -> list[BucketSegment]:
    part = treated.part
    return [segment for segment in bucket.segments if part.start <= segment.start < part.stop]


def _master(bucket: Bucket) -> Tensor:
    values = bucket.own_values
    assert isinstance(values, Tensor)
    return values if is_master(bucket.dtype, True) else values.float()
