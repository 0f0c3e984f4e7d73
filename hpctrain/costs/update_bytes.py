"""Bytes of temporary memory that an update of the parameters takes, and sizes of its state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from math import prod

import torch

from hpctrain.optim.matrix.adafactor import Adafactor
from hpctrain.optim.matrix.adam_mini import AdamMini
from hpctrain.optim.matrix.exchanged_matrices import ExchangedMatrices
from hpctrain.optim.matrix.local_matrices import LocalMatrices
from hpctrain.optim.matrix.matrix_optimizer import MatrixOptimizer
from hpctrain.optim.matrix.matrix_rule import CellLayout, MatrixRule, MatrixRules
from hpctrain.optim.matrix.muon import Muon
from hpctrain.optim.matrix.split_matrices import MatrixExchange
from hpctrain.optim.offload import OffloadedOptimizer
from hpctrain.optim.optimizer import Optimizer
from hpctrain.parallel.shards import Parameter, Shard, UpdateSettings
from hpctrain.sharding.state import MASTER


@singledispatch
def update_bytes(optimizer: Optimizer) -> int:  # noqa: ARG001
    """Return the bytes of temporary memory of an update. Most optimizers need none."""
    return 0


@update_bytes.register
def _offloaded_bytes(optimizer: OffloadedOptimizer) -> int:
    return sum(copy.nbytes for buffer in optimizer.piece_buffers for copy in buffer.memory.values())


@update_bytes.register
def _matrix_bytes(optimizer: MatrixOptimizer) -> int:
    """Return the bytes of gathered matrices, directions and fp32 gradients."""
    rule = optimizer.rules.matrix_rule
    gathered: list[int] = [
        (each.part.stop - each.part.start) * rule.dtype.itemsize for each in optimizer.replicated
    ]
    copied = [each for each in optimizer.ranges if each.bucket.gradient_dtype != torch.float32]
    ranges = (each.state[MASTER].nbytes for each in copied)
    parameters = (_parameter_bytes(each, rule) for each in optimizer.parameters)
    exchanged = [
        *optimizer.exchanged,
        *(each for replicated in optimizer.replicated for each in replicated.exchanged),
    ]
    most = max((*ranges, *parameters, *map(_exchanged_bytes, exchanged)), default=0)
    return most + sum(sorted(gathered)[-2:])


def _parameter_bytes(matrices: LocalMatrices, rule: MatrixRule) -> int:
    """Return the bytes for the update of one matrix of a parameter, without those of an exchange."""
    block = matrices.segment.parameter.update_block
    assert block is not None
    if not matrices.count or not matrices.segment.parameter.requires_grad:
        return 0
    if matrices.is_exchanged:
        return _direction_bytes(matrices)
    elements = prod(matrices.local)
    copied = elements * 4 * (matrices.bucket.gradient_dtype != torch.float32)
    gathered = 0
    if matrices.split_matrix is not None:
        gathered = matrices.split_matrix.group.size * elements + prod(block.shape)
    return (elements + gathered) * rule.dtype.itemsize + copied + transform_bytes(rule, block.shape)


def _direction_bytes(matrices: LocalMatrices) -> int:
    """Return the bytes of the fp32 directions of one matrix, and of its gradients in another dtype."""
    return prod(matrices.local) * 4 * (1 + (matrices.bucket.gradient_dtype != torch.float32))


def _exchanged_bytes(exchanged: ExchangedMatrices) -> int:
    directions = [_direction_bytes(matrices) for matrices, _ in exchanged.matrices]
    transforms = [transform_bytes(exchanged.rule, each.shape) for each in exchanged.exchange.matrices]
    return exchange_bytes(exchanged.exchange, directions, transforms)


def exchange_bytes(exchange: MatrixExchange, directions: Sequence[int], transforms: Sequence[int]) -> int:
    """Return the bytes that `MatrixExchange.run` needs on this rank.

    Args:
        exchange: The exchange.
        directions: For each matrix, the bytes of its directions.
        transforms: For each matrix, the bytes that its transformation needs.
    """
    most, rank, itemsize = 0, exchange.group.rank, exchange.dtype.itemsize
    buffers = []  # for each round: this rank's pieces, and all pieces of the matrix that it transforms
    for assignment in exchange.rounds:
        sizes = exchange.piece_sizes(assignment)
        buffers.append((sum(sizes) + exchange.group.size * sizes[rank]) * itemsize)
    for index, assignment in enumerate(exchange.rounds):
        copied = max(directions[number] for number in assignment if number is not None)
        most = max(most, sum(buffers[max(0, index - 2) : index + 1]) + copied)
        assigned = assignment[rank]
        if assigned is not None:
            matrix = prod(exchange.matrices[assigned].shape) * itemsize + transforms[assigned]
            most = max(most, sum(buffers[max(0, index - 1) : index + 2]) + matrix)
    return most


@singledispatch
def transform_bytes(rule: MatrixRule, shape: Sequence[int]) -> int:  # noqa: ARG001
    """Return the bytes of temporary memory that `MatrixRule.transform` needs for a block of a shape."""
    return 0


@transform_bytes.register
def _muon_bytes(rule: Muon, shape: Sequence[int]) -> int:
    """Return the bytes of a second iterate and of two symmetric products."""
    return (prod(shape) + 2 * min(shape[-2:]) ** 2) * rule.dtype.itemsize


@transform_bytes.register
def _adafactor_bytes(_: Adafactor, shape: Sequence[int]) -> int:
    """Return the bytes of four numbers for each row and column: new means and factors."""
    return 4 * 4 * sum(shape[-2:])


@transform_bytes.register
def _adam_mini_bytes(_: AdamMini, shape: Sequence[int]) -> int:
    """Return the bytes of three numbers for each row."""
    return 4 * 3 * prod(shape[:-1])


def state_per_element(rules: MatrixRules, update_settings: UpdateSettings) -> int:
    """Return how many numbers of state each element has, without master weights and state of cells."""
    if not update_settings.in_blocks:
        return len(rules.element_state_names)
    return sum(cell is None for cell in rules.matrix_rule.cells(Shard.replicated("", (1, 1))).values())


def cell_state_elements(rules: MatrixRules, parameter: Parameter, elements: int) -> int:
    """Return how many numbers the state of cells has for some elements of a parameter.

    Args:
        rules: Rules of the update.
        parameter: The parameter, after `MatrixRules.assign`.
        elements: Number of elements, a multiple of those of a block.
    """
    shard, block = parameter.shard, parameter.update_block
    if block is None:
        return 0
    cells = (cell for cell in rules.matrix_rule.cells(shard).values() if cell is not None)
    each = sum(prod(CellLayout.of(shard, block, cell).block_shape) for cell in cells)
    return elements // block.elements(shard) * each
