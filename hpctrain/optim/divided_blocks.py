"""Blocks that the ranks which hold pieces of them divide among themselves, by a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.optim.matrix_rule import MatrixRule
from hpctrain.optim.own_blocks import OwnBlocks, single
from hpctrain.optim.split_matrices import SplitMatrices, SplitMatrix


@dataclass(frozen=True)
class DividedBlocks:
    """Blocks that this rank is to see transformed and `numbers` theirs, which the ranks that hold pieces of
    them divide among themselves.
    """

    rule: MatrixRule
    blocks: Sequence[tuple[OwnBlocks, int]]
    division: SplitMatrices

    @staticmethod
    def all_of(rule: MatrixRule, blocks: Sequence[OwnBlocks]) -> list[DividedBlocks]:
        """One for each group of ranks that hold pieces. Collective over these."""
        found: dict[Group, list[tuple[OwnBlocks, int, SplitMatrix]]] = {}
        for each in blocks:
            if each.cut is not None and each.divided:
                numbers = [number for number in range(each.count) if each.owned(number)]
                found.setdefault(each.cut.group, []).extend((each, number, each.cut) for number in numbers)
        made = []
        for group, of_group in found.items():
            names = [[each.segment.parameter.shard.name, each.first + number] for each, number, _ in of_group]
            division = SplitMatrices(group, [cut for _, _, cut in of_group], names, rule.format)
            made.append(DividedBlocks(rule, [(each, number) for each, number, _ in of_group], division))
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

        def follow(blocks: OwnBlocks, number: int, directions: Tensor) -> None:
            self.rule.follow(blocks.part(number, updates), directions, learning_rate)

        self.transform(updates, gradient_divisor, follow)

    def transform(
        self, updates: float, gradient_divisor: float, follow: Callable[[OwnBlocks, int, Tensor], None]
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
