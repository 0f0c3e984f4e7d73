"""Faults in the training of modules that users bring."""

from __future__ import annotations

from functools import partial
from typing import Any

import hpctrain.optim.clip as clip
import hpctrain.sharding.synchronize as synchronize
from hpctrain.data.batches import Batches
from hpctrain.optim.optimizer import ResidentOptimizer
from hpctrain.train.step import Step
from tests.train.layout_faults.fault import LayoutFault
from tests.train.layout_faults.planting import changed_results, scale, scaled_state, wrapped
from tests.train.layout_faults.scene import in_third_micro_batch, on_rank_1
from tests.train.layout_faults.shared_changes import (
    ADAMW_MOMENT,
    average_each_micro_batch,
    change_rate,
    count_local_tokens,
    count_no_elements,
    count_one_token_more,
    read_samples_of_rank_0,
)

fault = partial(LayoutFault, "module")


def faults() -> list[LayoutFault]:
    """Return the faults of this seam."""
    return [
        fault(
            "gradients that are moved twice",
            (),
            wrapped(synchronize, "_move_gradient", _double_gradient),
            "Right",
        ),
        fault(
            "a mean in place of a sum",
            (),
            changed_results("data", "all_reduce", scale(0.5), lambda s: s.micro_batch >= 0),
            "Right",
        ),
        fault(
            "weights that are gathered wrong",
            ("layout.zero=3",),
            changed_results("data", "all_gather", scale(1.01), in_third_micro_batch),
            "Right",
        ),
        fault(
            "slices of sums",
            ("layout.zero=2",),
            changed_results("data", "reduce_scatter", scale(1.01)),
            "Right",
        ),
        fault("tokens of one rank alone", (), wrapped(Step, "read", count_local_tokens), "Right"),
        fault("a token too many", (), wrapped(Step, "read", count_one_token_more), "Right"),
        fault("the samples of another rank", (), wrapped(Batches, "step", read_samples_of_rank_0), "Right"),
        fault("moments of one rank", ("layout.zero=1",), scaled_state(*ADAMW_MOMENT), "Right"),
        fault(
            "an update of one rank",
            ("layout.zero=1",),
            wrapped(ResidentOptimizer, "step", change_rate, on_rank_1),
            "Right",
        ),
        fault(
            "a norm of one rank's slice",
            ("layout.zero=1",),
            wrapped(clip, "_gradients_in_norm", count_no_elements, on_rank_1),
            "Right",
        ),
        fault("means of micro-batches", (), wrapped(Step, "prepare", average_each_micro_batch), "Right"),
    ]


def _double_gradient(original: Any, parameter: Any) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(2)
    original(parameter)
