"""The seven kinds of faults by which `hpctrain check` was tried first."""

from __future__ import annotations

from functools import partial

import hpctrain.model.mixtures.router as router
from hpctrain.parallel.fp8.delayed_matmul import MaximaHistory
from hpctrain.train.step import Step
from tests.train.layout_faults.deck_keys import (
    BALANCED_OVER_STEP,
    BIASED,
    CONTEXT,
    DELAYED_SCALES,
    PIPELINE,
    TENSOR,
)
from tests.train.layout_faults.fault import LayoutFault
from tests.train.layout_faults.planting import changed_positions, changed_results, scale, wrapped, zero
from tests.train.layout_faults.scene import Scene, in_last_update, in_third_micro_batch
from tests.train.layout_faults.shared_changes import average_each_micro_batch, double_maximum, reverse_counts

fault = partial(LayoutFault, "tried")


def faults() -> list[LayoutFault]:
    """Return the faults of this seam."""
    return [
        fault(
            "sum of the third micro-batch",
            TENSOR,
            changed_results("tensor", "all_reduce", zero, in_third_micro_batch),
        ),
        fault("message of the third micro-batch", PIPELINE, change_third_message),
        fault(
            "bias of a router", BIASED, wrapped(router.Router, "after_update", reverse_counts, in_last_update)
        ),
        fault(
            "shares of a router",
            BALANCED_OVER_STEP,
            wrapped(router.Router, "after_update", reverse_counts, in_last_update),
        ),
        fault(
            "maxima of products in 8 bits",
            DELAYED_SCALES,
            wrapped(MaximaHistory, "append", double_maximum, in_last_update),
        ),
        fault("tokens of uneven micro-batches", (), wrapped(Step, "prepare", average_each_micro_batch)),
        fault("rotation at late positions", CONTEXT, changed_positions(lambda each: each.bfloat16())),
    ]


def change_third_message(scene: Scene) -> None:
    """Change the last of the three messages that the last stage receives in a step."""
    messages = 0

    def is_third(scene: Scene) -> bool:
        nonlocal messages
        messages += scene.rank == 1
        return messages % 3 == 0 and scene.rank == 1

    scene.communicated("pipeline", "recv", scale(1.1), is_third)
