"""Update of matrices that tensor ranks hold in pieces, each of which is transformed by one rank.

`optim/matrix/__init__.py` explains which rank transforms which matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.optim.matrix.local_matrices import LocalMatrices, with_fp32_gradients
from hpctrain.optim.matrix.matrix_rule import MatrixRule
from hpctrain.optim.matrix.split_matrices import MatrixExchange, SplitMatrix


@dataclass(frozen=True)
class ExchangedMatrices:
    """Matrices of which this rank holds pieces, and the exchange in which one rank transforms each of them.

    Attributes:
        rule: Update rule of the matrices.
        matrices: The parameter of each matrix, and the matrix's number in it.
        exchange: Exchange of the same matrices, in the same order.
    """

    rule: MatrixRule
    matrices: Sequence[tuple[LocalMatrices, int]]
    exchange: MatrixExchange

    @staticmethod
    def all_of(rule: MatrixRule, parameters: Sequence[LocalMatrices]) -> list[ExchangedMatrices]:
        """Return the exchanged matrices of parameters, one object for each group of ranks that hold pieces.

        Each object has only the matrices that this data rank transforms (`LocalMatrices.is_assigned`).
        Collective over these groups.
        """
        by_group: dict[Group, list[tuple[LocalMatrices, int, SplitMatrix]]] = {}
        for each in parameters:
            split = each.split_matrix
            if split is not None and each.is_exchanged:
                numbers = [number for number in range(each.count) if each.is_assigned(number)]
                by_group.setdefault(split.group, []).extend((each, number, split) for number in numbers)
        result = []
        for group, of_group in by_group.items():
            names = [[each.segment.parameter.shard.name, each.first + number] for each, number, _ in of_group]
            exchange = MatrixExchange(group, [split for _, _, split in of_group], names, rule.dtype)
            matrices = [(each, number) for each, number, _ in of_group]
            result.append(ExchangedMatrices(rule, matrices, exchange))
        return result

    def update(self, updates: float, learning_rate: float, gradient_divisor: float) -> None:
        """Update this rank's pieces of all matrices. Collective over the ranks that hold pieces.

        Args:
            updates: Number of updates before this one.
            learning_rate: Learning rate of the step.
            gradient_divisor: Number by which the gradients are divided.
        """

        def apply(parameter: LocalMatrices, number: int, directions: Tensor) -> None:
            self.rule.apply(parameter.element_batch(number, updates), directions, learning_rate)

        self.transform(updates, gradient_divisor, apply)

    def transform(
        self, updates: float, gradient_divisor: float, apply: Callable[[LocalMatrices, int, Tensor], None]
    ) -> None:
        """Transform all matrices. Collective over the ranks that hold pieces.

        Args:
            updates: Number of updates before this one.
            gradient_divisor: Number by which the gradients are divided.
            apply: Receives the parameter and the number of each matrix, and this rank's piece of its
                transformed directions.
        """

        def directions(index: int) -> Tensor:
            parameter, number = self.matrices[index]
            batch = with_fp32_gradients(parameter.element_batch(number, updates))
            return self.rule.direction(batch, gradient_divisor)

        self.exchange.run(
            directions,
            lambda _, matrix: self.rule.transform(matrix, {}),
            lambda index, piece: apply(*self.matrices[index], piece),
        )
