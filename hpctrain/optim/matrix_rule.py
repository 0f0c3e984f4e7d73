"""How parameters are updated in blocks, such as whole matrices, and which parameters are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hpctrain.optim.optimizer import ElementBatch, UpdateRule
from hpctrain.parallel.shard import Parameter, Shard, UpdateBlock, UpdateSettings


class MatrixRule(Protocol):
    """Update rule of matrices that may be split between ranks.

    An update has three steps: elementwise on the pieces (`direction`), on the gathered matrix
    (`transformed`), and elementwise on the pieces again (`follow`). So a rule sees whole matrices, and each
    rank keeps the state of its own pieces.
    """

    def block(self, shard: Shard) -> UpdateBlock | None:
        """Return the blocks of a parameter; None if this rule does not apply to it."""

    def cells(self, shard: Shard) -> Mapping[str, Sequence[int] | None]:
        """Return the names and shapes of the optimizer state of a parameter other than its master weights.

        The state is initialized with zeros. None stands for one number per element. A shape stands for one
        number per cell of this shape, which has as many dims as the parameter: (1, m) is one number per row
        of a block [n, m]. All cells of a block are full, except the last ones.
        """

    def working_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of temporary memory that `transformed` needs for a block of a shape."""

    @property
    def format(self) -> torch.dtype:
        """dtype of the directions that are gathered, and of the transformed ones."""

    def direction(self, part: ElementBatch, gradient_divisor: float) -> Tensor:
        """Return the direction of a piece of a block, in its shape, and update the state of its elements.

        The gradients are divided by `gradient_divisor` in place.
        """

    def transformed(self, directions: Tensor, cells: Mapping[str, Tensor]) -> Tensor:
        """Return the transformed directions of a whole block, and update the state of its cells.

        The given directions may be overwritten.
        """

    def follow(self, part: ElementBatch, directions: Tensor, learning_rate: float) -> None:
        """Update the weights of a piece of a block with its transformed directions."""


@dataclass(frozen=True)
class MatrixRules:
    """A rule for the Blocks of parameters that `patterns` name, of all if not told, and one for the elements
    of the `others`, whose learning rate is `others_rate` times that of the step.
    """

    blocks: MatrixRule
    patterns: Sequence[str] = ("*",)
    others: UpdateRule | None = None
    others_rate: float = 1.0

    @property
    def names_of_others(self) -> tuple[str, ...]:
        """Those of the state of elements that are in no block."""
        return self.others.names if self.others is not None else ()

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the state of parameters beside master weights."""
        return (*self.names_of_others, *self.blocks.cells(Shard.whole("", (1, 1))))

    def numbers(self, treatment: UpdateSettings) -> int:
        """Of state beside weights that an element has which is treated so, without that of cells."""
        if not treatment.in_blocks:
            return len(self.names_of_others)
        return sum(cell is None for cell in self.blocks.cells(Shard.whole("", (1, 1))).values())

    def cell_numbers(self, parameter: Parameter, elements: int) -> int:
        """Of state of cells that so many elements of a parameter, in whole blocks, have."""
        shard, block = parameter.shard, parameter.block
        if block is None:
            return 0
        cells = (cell for cell in self.blocks.cells(shard).values() if cell is not None)
        each = sum(prod(Cells.of(shard, block, cell).of_block) for cell in cells)
        return elements // block.elements(shard) * each

    def assign(self, parameters: Sequence[Parameter]) -> None:
        """Have parameters be updated in blocks; all, where there is no rule for others."""
        for parameter in parameters:
            if any(fnmatchcase(parameter.shard.name, pattern) for pattern in self.patterns):
                parameter.block = self.blocks.block(parameter.shard)
            updated = parameter.block is not None or self.others is not None
            assert updated, f"{parameter.shard.name}: no rule updates it"


class Cells(NamedTuple):
    """State with a number for each cell: the Shard of its tensor, and a block's shape in it."""

    shard: Shard
    of_block: tuple[int, ...]

    @staticmethod
    def of(shard: Shard, block: UpdateBlock, cell: Sequence[int]) -> Cells:
        """Of a parameter's blocks; pieces of one block all have whole what is its own."""
        of_block = tuple(-(-size // each) for size, each in zip(block.shape, cell, strict=True))

        def blocks(elements: Sequence[int]) -> list[int]:
            return [-(-number // size) for number, size in zip(elements, block.shape, strict=True)]

        def numbers(elements: Sequence[int]) -> tuple[int, ...]:
            return tuple(count * each for count, each in zip(blocks(elements), of_block, strict=True))

        start = tuple(
            at // size * each for at, size, each in zip(shard.start, block.shape, of_block, strict=True)
        )
        alike = blocks(shard.held) == blocks(shard.shape) and not shard.is_longer
        split = frozenset[str]() if alike else shard.split
        own = replace(shard, shape=numbers(shard.shape), start=start, local=numbers(shard.held), split=split)
        return Cells(own, of_block)
