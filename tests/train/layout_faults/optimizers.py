"""Faults of optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import hpctrain.optim.matrix.muon as muon
import hpctrain.train.step as step_module
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.matrix.adam_mini import SQUARE, AdamMini
from hpctrain.optim.matrix.muon import Muon
from hpctrain.optim.optimizer import ResidentOptimizer
from hpctrain.optim.sgd import SGD
from tests.train.layout_faults.deck_keys import ADAM_MINI, MUON, PIPELINE, TENSOR
from tests.train.layout_faults.fault import LayoutFault
from tests.train.layout_faults.planting import scaled_state, wrapped
from tests.train.layout_faults.scene import in_last_update, on_rank_1
from tests.train.layout_faults.shared_changes import change_rate

fault = partial(LayoutFault, "optimizer")


def faults() -> list[LayoutFault]:
    """Return the faults of this seam."""
    return [
        fault("a count of updates", (), wrapped(AdamW, "update", _count_one_update_more, on_rank_1)),
        fault("decay of all", (), wrapped(AdamW, "update", _decay_everything, on_rank_1)),
        fault("second moments", ("layout.zero=2",), scaled_state(AdamW, "exp_avg_sq", 0.9, in_last_update)),
        fault(
            "clipping by another norm",
            ("layout.zero=3",),
            wrapped(step_module, "clip_coefficient", _use_smaller_norm, on_rank_1),
        ),
        fault(
            "a rate of one rank",
            ("layout.zero=1",),
            wrapped(ResidentOptimizer, "step", change_rate, on_rank_1),
        ),
        fault(
            "matrices that are orthogonal in parts",
            MUON,
            wrapped(muon, "orthogonalize", _orthogonalize_halves),
        ),
        fault("the size of a matrix's steps", MUON, wrapped(Muon, "apply", _enlarge_step, on_rank_1)),
        fault(
            "momentum of a piece of a matrix",
            MUON,
            wrapped(
                Muon,
                "direction",
                lambda original, own, part, divisor: original(own, part, divisor * 1.01),
                in_last_update,
            ),
        ),
        fault(
            "momentum of one rank",
            ("optimizer.name=sgd", "optimizer.sgd.momentum=0.9", "layout.zero=1"),
            scaled_state(SGD, "momentum", 0.5, in_last_update),
        ),
        fault(
            "means of squares of other cells",
            ADAM_MINI,
            wrapped(AdamMini, "transform", _divide_by_next_cell),
        ),
        fault(
            "a mean of squares of one rank's half of a cell",
            (*ADAM_MINI, *TENSOR),
            wrapped(AdamMini, "transform", _average_first_half),
        ),
        fault(
            "means of squares of one rank",
            (*ADAM_MINI, "layout.zero=1"),
            wrapped(AdamMini, "transform", _shrink_means, in_last_update),
        ),
        fault(
            "Lion's momentum",
            ("optimizer.name=lion", *PIPELINE),
            scaled_state(SGD, "momentum", 0.5, in_last_update),
        ),
    ]


def _orthogonalize_halves(original: Any, matrix: Tensor, steps: int) -> Tensor:
    half = len(matrix) // 2
    return torch.cat([original(part.clone(), steps) for part in (matrix[:half], matrix[half:])])


def _enlarge_step(original: Any, rule: Any, part: Any, directions: Tensor, rate: float) -> None:
    original(rule, part, directions, rate * 1.02)


def _divide_by_next_cell(original: Any, rule: AdamMini, directions: Tensor, cells: Any) -> Tensor:
    roots = original(rule, directions, cells)
    by_cell = roots.view(cells[SQUARE].numel(), -1)
    by_cell.copy_(by_cell.roll(1, 0))
    return roots


def _average_first_half(original: Any, rule: AdamMini, directions: Tensor, cells: Any) -> Tensor:
    by_cell = directions.view(cells[SQUARE].numel(), -1)
    half = by_cell.shape[1] // 2
    by_cell[:, -half:] = by_cell[:, :half]
    return original(rule, directions, cells)


def _shrink_means(original: Any, rule: AdamMini, directions: Tensor, cells: Any) -> Tensor:
    roots = original(rule, directions, cells)
    cells[SQUARE].mul_(0.9)
    return roots


def _count_one_update_more(original: Any, rule: Any, parts: Sequence[Any], *rest: Any) -> None:
    for part in parts:
        part.updates.add_(1)
    original(rule, parts, *rest)


def _decay_everything(original: Any, rule: Any, parts: Sequence[Any], *rest: Any) -> None:
    decayed = [
        replace(part, update_settings=part.update_settings._replace(has_weight_decay=True)) for part in parts
    ]
    original(rule, decayed, *rest)


def _use_smaller_norm(original: Any, norm: float, limit: float) -> float:
    return original(norm * 0.7, limit)
