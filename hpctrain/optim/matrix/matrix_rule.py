"""Interface of update rules that need whole matrices, and the choice of the parameters that they update.

What a rule updates together is an `UpdateBlock`: for Muon a matrix, for Adafactor a matrix or a vector, for
Adam-mini some rows of a matrix. This package calls all of them matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hpctrain.optim.optimizer import ElementBatch, UpdateRule
from hpctrain.parallel.shards import Parameter, Shard, UpdateBlock


class MatrixRule(Protocol):
    """Update rule of matrices that may be split between ranks.

    An update has three steps: elementwise on the pieces (`direction`), on the gathered matrix (`transform`),
    and elementwise on the pieces again (`apply`). So a rule sees whole matrices, and each rank keeps the
    state of its own pieces. All methods are local.
    """

    def update_block(self, shard: Shard) -> UpdateBlock | None:
        """Return the part of a parameter that is updated together; None if the rule does not apply to it.

        A parameter consists of one or several such blocks, all of the same shape. The result has the shape,
        and the FLOPs of the update of one block. Ranks share the work of updates by whole blocks.
        """

    def cells(self, shard: Shard) -> Mapping[str, Sequence[int] | None]:
        """For each state, return the shape of a cell. All elements of a cell share one value of the state.

        None: each element has its own value, so the state has the shape of the parameter. The keys are the
        names of all optimizer state but the master weights. State is initialized with zeros. The shape of a
        cell has as many dims as the parameter. For a block [n, m] the cell (1, m) is a row, so the state of
        the block has the shape [n, 1]. Cells at the end of a block may be smaller.
        """

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the directions that are gathered, and of the transformed ones."""

    def direction(self, part: ElementBatch, gradient_divisor: float) -> Tensor:
        """Return the direction of a piece of a block, in its shape, and update the state of its elements.

        The gradients are divided by `gradient_divisor` in place.
        """

    def transform(self, directions: Tensor, cells: Mapping[str, Tensor]) -> Tensor:
        """Return the transformed directions of a whole block, and update the state of its cells.

        The given directions may be overwritten.
        """

    def apply(self, part: ElementBatch, directions: Tensor, learning_rate: float) -> None:
        """Update the weights of a piece of a block with its transformed directions."""


@dataclass(frozen=True)
class MatrixRules:
    """Update rule of the parameters whose names match patterns, and update rule of all other elements.

    Attributes:
        matrix_rule: Rule of the parameters that match one of the patterns and that it applies to.
        patterns: Patterns of parameter names, with the wildcards of `fnmatch`.
        element_rule: Rule of the other elements. It may be None if `matrix_rule` applies to all parameters.
        element_rate: Factor of the learning rate of `element_rule`.
    """

    matrix_rule: MatrixRule
    patterns: Sequence[str] = ("*",)
    element_rule: UpdateRule | None = None
    element_rate: float = 1.0

    @property
    def element_state_names(self) -> tuple[str, ...]:
        """Names of the optimizer state of elements that `element_rule` updates."""
        return self.element_rule.names if self.element_rule is not None else ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the optimizer state of all parameters other than the master weights."""
        return (*self.element_state_names, *self.matrix_rule.cells(Shard.replicated("", (1, 1))))

    def assign(self, parameters: Sequence[Parameter]) -> None:
        """Set `update_block` of the parameters that `matrix_rule` updates. Local, before buckets are made."""
        for parameter in parameters:
            if any(fnmatchcase(parameter.shard.name, pattern) for pattern in self.patterns):
                parameter.update_block = self.matrix_rule.update_block(parameter.shard)
            updated = parameter.update_block is not None or self.element_rule is not None
            assert updated, f"{parameter.shard.name}: no rule updates it"


class CellLayout(NamedTuple):
    """Layout of state that has one number for each cell of a parameter.

    Attributes:
        shard: Shard of the tensor that consists of these numbers.
        block_shape: Shape of the numbers of one block.
    """

    shard: Shard
    block_shape: tuple[int, ...]

    @staticmethod
    def of(shard: Shard, block: UpdateBlock, cell: Sequence[int]) -> CellLayout:
        """Return the layout of a state with one number for each cell of the shape `cell`.

        Ranks that hold pieces of one block all hold the numbers of the whole block.

        Args:
            shard: Shard of the parameter.
            block: Block of the parameter.
            cell: Shape of a cell.
        """
        block_shape = tuple(-(-size // each) for size, each in zip(block.shape, cell, strict=True))

        def blocks(elements: Sequence[int]) -> list[int]:
            return [-(-number // size) for number, size in zip(elements, block.shape, strict=True)]

        def numbers(elements: Sequence[int]) -> tuple[int, ...]:
            return tuple(count * each for count, each in zip(blocks(elements), block_shape, strict=True))

        start = tuple(
            at // size * each for at, size, each in zip(shard.start, block.shape, block_shape, strict=True)
        )
        same_blocks = blocks(shard.clipped_local) == blocks(shard.shape) and not shard.is_longer
        split = frozenset[str]() if same_blocks else shard.split
        local = numbers(shard.clipped_local)
        cells = replace(
            shard, shape=numbers(shard.shape), start=start, local=local, split=split, unpadded_local=None
        )
        return CellLayout(cells, block_shape)
