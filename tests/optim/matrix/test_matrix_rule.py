"""Parameters that are updated in blocks, and the size of their state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import pytest
import torch
from torch import Tensor

from hpctrain.costs.update_bytes import cell_state_elements, state_per_element
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.matrix.matrix_rule import CellLayout, MatrixRules
from hpctrain.optim.optimizer import ElementBatch
from hpctrain.parallel.shards import Parameter, Shard, UpdateBlock

ADAMW = AdamW((0.9, 0.95), 1e-8, 0.0)


class Rows:
    """Rule of matrices with a number for each element and each row. It updates nothing."""

    dtype = torch.float32

    def update_block(self, shard: Shard) -> UpdateBlock | None:
        shape = (1,) * (len(shard.shape) - 2) + shard.shape[-2:]
        return UpdateBlock(shape, float(prod(shape))) if len(shape) > 1 else None

    def cells(self, shard: Shard) -> Mapping[str, Sequence[int] | None]:
        return {"velocity": None, "row": (1,) * (len(shard.shape) - 1) + shard.shape[-1:]}

    def direction(self, part: ElementBatch, gradient_divisor: float) -> Tensor:
        return part.gradients

    def transform(self, directions: Tensor, cells: Mapping[str, Tensor]) -> Tensor:
        return directions

    def apply(self, part: ElementBatch, directions: Tensor, learning_rate: float) -> None: ...


def parameters() -> dict[str, Parameter]:
    shapes = {"a.weight": (5, 7), "a.bias": (5,), "b.weight": (2, 3, 4)}
    return {name: Parameter(Shard.replicated(name, shape)) for name, shape in shapes.items()}


def test_matching_parameters_are_updated_in_blocks_if_the_rule_applies() -> None:
    for patterns, expected in {
        ("*",): {"a.weight": (5, 7), "b.weight": (1, 3, 4)},
        ("b.*", "*.bias"): {"b.weight": (1, 3, 4)},
    }.items():
        found = parameters()
        MatrixRules(Rows(), patterns, ADAMW).assign(list(found.values()))
        assert {
            name: p.update_block.shape for name, p in found.items() if p.update_block is not None
        } == expected


def test_a_parameter_without_a_rule_is_found() -> None:
    """The parameter matches no pattern, or the rule of blocks does not apply to it."""
    found = parameters()
    matrices = [found["a.weight"], found["b.weight"]]
    MatrixRules(Rows()).assign(matrices)
    assert all(each.update_block is not None for each in matrices)
    with pytest.raises(AssertionError, match=r"a\.bias: no rule updates it"):
        MatrixRules(Rows()).assign(list(found.values()))
    with pytest.raises(AssertionError, match=r"a\.weight: no rule updates it"):
        MatrixRules(Rows(), ("b.*",)).assign([parameters()["a.weight"]])


def test_numbers_of_state_are_those_of_either_rule() -> None:
    found = parameters()
    rules, alone = MatrixRules(Rows(), ("*",), ADAMW), MatrixRules(Rows())
    rules.assign(list(found.values()))
    assert rules.names == ("exp_avg", "exp_avg_sq", "velocity", "row")
    assert alone.names == ("velocity", "row")
    settings = [found[name].update_settings for name in ("a.weight", "a.bias")]
    assert [state_per_element(rules, each) for each in settings] == [1, 2]
    assert state_per_element(alone, settings[0]) == 1
    of_cells = {name: cell_state_elements(rules, each, each.shard.elements) for name, each in found.items()}
    assert of_cells == {"a.weight": 5, "a.bias": 0, "b.weight": 2 * 3}
    assert cell_state_elements(rules, found["b.weight"], 12) == 3  # one of the two matrices


def test_each_stacked_matrix_has_its_own_cells() -> None:
    shard = Shard.replicated("experts", (3, 2, 4, 5))
    block = UpdateBlock((1, 1, 4, 5), 1.0)
    for cell, of_block, whole in (
        ((1, 1, 1, 5), (1, 1, 4, 1), (3, 2, 4, 1)),
        ((1, 1, 4, 1), (1, 1, 1, 5), (3, 2, 1, 5)),
        ((1, 1, 4, 5), (1, 1, 1, 1), (3, 2, 1, 1)),
        ((1, 1, 3, 5), (1, 1, 2, 1), (3, 2, 2, 1)),  # the last cells are smaller
    ):
        cells = CellLayout.of(shard, block, cell)
        assert (cells.block_shape, cells.shard.shape, cells.shard.local) == (of_block, whole, whole)


def test_pieces_of_a_block_share_all_its_cells() -> None:
    """Rows 4 to 8 of eight: of one block of all rows, or of four blocks of two."""
    piece = replace(Shard.replicated("m", (8, 6)), start=(4, 0), local=(4, 6), split=frozenset({"tensor"}))
    whole = CellLayout.of(piece, UpdateBlock((8, 6), 1.0), (1, 6))
    assert (whole.block_shape, whole.shard.shape, whole.shard.local) == ((8, 1), (8, 1), (8, 1))
    assert (whole.shard.start, whole.shard.split) == ((0, 0), frozenset())
    own = CellLayout.of(piece, UpdateBlock((2, 6), 1.0), (1, 6))
    assert (own.block_shape, own.shard.shape, own.shard.local) == ((2, 1), (8, 1), (4, 1))
    assert (own.shard.start, own.shard.split) == ((4, 0), frozenset({"tensor"}))
