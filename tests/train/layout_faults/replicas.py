"""Faults of replicas and compressed sums of gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import hpctrain.sharding.compression.power as power
import hpctrain.sharding.local_steps.local_steps as local_steps
from hpctrain.sharding.compression.compressed_reduction import CodedSum
from hpctrain.sharding.compression.top_k import TopK
from hpctrain.sharding.local_steps.local_steps import LocalSteps, OuterOptimizer
from hpctrain.sharding.replica_sync import SyncEveryStep
from tests.train.layout_faults.deck_keys import AVERAGE, DILOCO, INT8, POWER_SGD, TOP_K
from tests.train.layout_faults.fault import LayoutFault
from tests.train.layout_faults.planting import scaled_argument, scaled_result, skipped_calls, wrapped
from tests.train.layout_faults.scene import on_rank_1

fault = partial(LayoutFault, "replicas")


def faults() -> list[LayoutFault]:
    """Return the faults of this seam."""
    return [
        fault("half of an outer gradient", DILOCO, wrapped(LocalSteps, "_finish", _halve_outer_gradient)),
        fault("no momentum", DILOCO, wrapped(OuterOptimizer, "update", _drop_momentum)),
        fault(
            "an outer model of one rank",
            DILOCO,
            wrapped(LocalSteps, "after_update", _scale_outer_model, on_rank_1),
        ),
        fault("a mean that is not one", AVERAGE, scaled_argument(OuterOptimizer, "update", 3, 0.9)),
        fault("sums of gradients", AVERAGE, skipped_calls(SyncEveryStep, "before_update")),
        fault("weights that stay a replica's own", AVERAGE, skipped_calls(local_steps, "_write", on_rank_1)),
        fault("what int8 loses", INT8, wrapped(CodedSum, "_encode_pieces", _drop_residual)),
        fault(
            "what bf16 loses on one rank",
            ("communication.compress=bf16",),
            wrapped(CodedSum, "_encode_pieces", _drop_residual, on_rank_1),
        ),
        fault("sums of codes", INT8, scaled_result(CodedSum, "add", 1.01, on_rank_1)),
        fault("signs that are added", ("communication.compress=sign",), scaled_result(CodedSum, "add", 0.9)),
        fault("what is not sent", TOP_K, wrapped(TopK, "_largest", _lose_part_of_remainder)),
        fault(
            "shares of a residual",
            POWER_SGD,
            wrapped(power.MatrixStack, "store_products", _subtract_everything),
        ),
        fault(
            "factors that are not orthogonal",
            POWER_SGD,
            wrapped(
                power,
                "orthonormal",
                lambda original, stacks: [1.1 * each for each in original(stacks)],
                on_rank_1,
            ),
        ),
    ]


def _drop_residual(
    original: Any, coded_sum: Any, blocks: Any, values: Tensor, encode: Any, feedback: bool
) -> Any:
    code = original(coded_sum, blocks, values, encode, feedback)
    if feedback:
        values.zero_()
    return code


def _lose_part_of_remainder(original: Any, top_k: TopK) -> Tensor:
    places = original(top_k)
    top_k.unsent.mul_(0.9)
    return places


def _subtract_everything(
    original: Any, stack: Any, left: Tensor, right: Tensor, gradients: Tensor, _: float
) -> None:
    original(stack, left, right, gradients, 1.0)


def _drop_momentum(
    original: Any, rule: OuterOptimizer, weights: Tensor, velocity: Any, gradient: Tensor
) -> None:
    original(rule, weights, None if velocity is None else torch.zeros_like(velocity), gradient)


def _halve_outer_gradient(original: Any, steps: LocalSteps, piece: Any, gradient: Tensor, *rest: Any) -> None:
    original(steps, piece, gradient.mul_(0.5), *rest)


def _scale_outer_model(original: Any, steps: LocalSteps, *rest: Any) -> Any:
    told = original(steps, *rest)
    for each in steps.outer:
        each.mul_(1.01)
    return told
