"""Faults of pipelines."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

import hpctrain.optim.clip as clip
import hpctrain.pipeline.execute as execute
import hpctrain.sharding.synchronize as synchronize
from hpctrain.comm.group import Group
from hpctrain.optim.optimizer import ResidentOptimizer
from hpctrain.parallel.random import DropoutSource
from hpctrain.parallel.tensor import SplitLinear
from tests.train.layout_faults.deck_keys import DROPOUT, INTERLEAVED, PIPELINE, TIED
from tests.train.layout_faults.fault import LayoutFault
from tests.train.layout_faults.planting import (
    changed_results,
    scale,
    scaled_argument,
    scaled_result,
    scaled_state,
    wrapped,
)
from tests.train.layout_faults.scene import in_second_step, in_third_micro_batch, on_rank_1
from tests.train.layout_faults.shared_changes import (
    ADAMW_MOMENT,
    change_rate,
    count_no_elements,
    mask_by_next_site,
)

fault = partial(LayoutFault, "pipeline")


def faults() -> list[LayoutFault]:
    """Return the faults of this seam."""
    return [
        fault(
            "gradient of the third micro-batch",
            PIPELINE,
            lambda s: s.communicated("pipeline", "recv", scale(0.5), lambda scene: scene.micro_batch >= 1),
        ),
        fault(
            "messages in 16 bits",
            PIPELINE,
            changed_results("pipeline", "recv", lambda v: v.copy_(v.bfloat16())),
        ),
        fault(
            "messages between chunks",
            INTERLEAVED,
            changed_results("pipeline", "recv", scale(1.01), in_second_step),
        ),
        fault(
            "tied tables that are not summed",
            TIED,
            scaled_result(synchronize, "exchange_with_other_end", 0.0),
        ),
        fault(
            "tied tables that are summed twice",
            TIED,
            wrapped(synchronize, "exchange_with_other_end", _double_tied_gradient, on_rank_1),
        ),
        fault(
            "micro-batches in another order",
            PIPELINE,
            wrapped(execute._ScheduleExecution, "__init__", _swap_micro_batches, on_rank_1),
        ),
        fault(
            "masks of another block",
            (*PIPELINE, *DROPOUT),
            wrapped(DropoutSource, "mask", mask_by_next_site, on_rank_1),
        ),
        fault(
            "a norm of one stage", PIPELINE, wrapped(clip, "_gradients_in_norm", count_no_elements, on_rank_1)
        ),
        fault("an update of one stage", PIPELINE, wrapped(ResidentOptimizer, "step", change_rate, on_rank_1)),
        fault("moments of one stage", PIPELINE, scaled_state(*ADAMW_MOMENT)),
        fault(
            "deferred gradients",
            (*PIPELINE, "layout.schedule=zb-h1"),
            scaled_argument(SplitLinear, "_add_gradients", 1, 0.5, in_third_micro_batch),
        ),
    ]


def _swap_micro_batches(
    original: Any, pipeline_pass: Any, executor: Any, schedule: Any, batches: Any
) -> None:
    original(pipeline_pass, executor, schedule, [batches[0], batches[2], batches[1], *batches[3:]])


def _double_tied_gradient(original: Any, pipeline: Group, gradient: Tensor) -> Tensor:
    return 2 * original(pipeline, gradient)
