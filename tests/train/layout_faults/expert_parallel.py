"""Faults of mixtures of experts."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

import hpctrain.model.mixtures.router as router
import hpctrain.parallel.experts.expert_layer as experts
from hpctrain.model.inputs import ModelInputs
from hpctrain.parallel.step_statistics import StepStatistics
from tests.train.layout_faults.deck_keys import BIASED, EXPERT, MIXTURE
from tests.train.layout_faults.fault import LayoutFault
from tests.train.layout_faults.planting import (
    changed_results,
    scale,
    scaled_argument,
    scaled_state,
    skipped_calls,
    wrapped,
)
from tests.train.layout_faults.scene import in_third_micro_batch, on_rank_1
from tests.train.layout_faults.shared_changes import ADAMW_MOMENT, reverse_counts

fault = partial(LayoutFault, "expert")


def faults() -> list[LayoutFault]:
    """Return the faults of this seam."""
    return [
        fault("gradients that are doubled", EXPERT, scaled_argument(experts, "add_grouped_gradient", 0, 2.0)),
        fault(
            "gradients of the third micro-batch",
            EXPERT,
            scaled_argument(experts, "add_grouped_gradient", 0, 0.0, in_third_micro_batch),
        ),
        fault(
            "rows of other tokens",
            EXPERT,
            changed_results("expert", "all_to_all", lambda v: v.copy_(v.roll(1, 0))),
        ),
        fault(
            "rows of the third micro-batch",
            EXPERT,
            changed_results("expert", "all_to_all", scale(1.1), in_third_micro_batch),
        ),
        fault(
            "a bias of one rank", BIASED, wrapped(router.Router, "after_update", reverse_counts, on_rank_1)
        ),
        fault("counts of one rank", BIASED, skipped_calls(StepStatistics, "record_sum", on_rank_1)),
        fault(
            "counts of the third micro-batch",
            BIASED,
            skipped_calls(StepStatistics, "record_sum", in_third_micro_batch),
        ),
        fault(
            "a balance loss of twice its weight",
            EXPERT,
            wrapped(router.Router, "add_auxiliary_losses", _double_balance_loss),
        ),
        fault("rows that fill up are routed", EXPERT, wrapped(ModelInputs, "real_rows", lambda *_: None)),
        fault(
            "features that are not summed",
            (*MIXTURE, "layout.expert_tensor=2"),
            changed_results("expert_tensor", "reduce_scatter", scale(0.5)),
        ),
        fault("moments of one rank's experts", EXPERT, scaled_state(*ADAMW_MOMENT)),
    ]


def _double_balance_loss(original: Any, layer: Any, *arguments: Any) -> Tensor:
    settings = layer.settings
    layer.settings = settings.model_copy(update={"balance_loss": settings.balance_loss * 2})
    weights = original(layer, *arguments)
    layer.settings = settings
    return weights
