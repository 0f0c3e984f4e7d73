"""Faults of data ranks and ZeRO."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

import hpctrain.optim.clip as clip
from hpctrain.comm.work import Work
from hpctrain.data.batches import Batches
from hpctrain.sharding.reducer import ExactReduction
from hpctrain.train.step import Step
from tests.train.layout_faults.deck_keys import DROPOUT
from tests.train.layout_faults.fault import LayoutFault
from tests.train.layout_faults.planting import changed_results, scale, scaled_state, wrapped, zero
from tests.train.layout_faults.scene import in_second_step, in_third_micro_batch, on_rank_1
from tests.train.layout_faults.shared_changes import (
    ADAMW_MOMENT,
    count_local_tokens,
    count_no_elements,
    read_samples_of_rank_0,
)

fault = partial(LayoutFault, "data")


def faults() -> list[LayoutFault]:
    """Return the faults of this seam."""
    return [
        fault(
            "a bucket that is not summed",
            (),
            wrapped(ExactReduction, "start", _skip_one_bucket, in_second_step),
        ),
        fault(
            "a mean in place of a sum",
            (),
            changed_results("data", "all_reduce", scale(0.5), lambda s: s.micro_batch >= 0),
        ),
        fault(
            "the other rank's slice of a sum",
            ("layout.zero=1",),
            changed_results("data", "reduce_scatter", lambda v: v.copy_(v.flip(0))),
        ),
        fault(
            "weights that are published wrong",
            ("layout.zero=1",),
            changed_results("data", "all_gather", scale(1.01), on_rank_1),
        ),
        fault(
            "weights that are gathered wrong",
            ("layout.zero=3",),
            changed_results("data", "all_gather", scale(1.01), in_third_micro_batch),
        ),
        fault(
            "slices of the third micro-batch",
            ("layout.zero=2", "memory.accumulate=sliced"),
            changed_results("data", "reduce_scatter", zero, in_third_micro_batch),
        ),
        fault(
            "a norm of one rank's slice",
            ("layout.zero=1",),
            wrapped(clip, "_gradients_in_norm", count_no_elements, on_rank_1),
        ),
        fault("the samples of another rank", (), wrapped(Batches, "step", read_samples_of_rank_0)),
        fault("tokens of one rank alone", (), wrapped(Step, "read", count_local_tokens)),
        fault(
            "masks of another rank",
            DROPOUT,
            lambda s: s.patch.setattr(
                Step, "first_sample", lambda step, state, number: state.samples + number * step.micro_size
            ),
        ),
        fault("a moment of one rank's slice", ("layout.zero=1",), scaled_state(*ADAMW_MOMENT)),
    ]


def _skip_one_bucket(original: Any, reduction: ExactReduction, gradients: Tensor, sums: Tensor) -> Any:
    if reduction.bucket.segments[0].parameter.shard.name.startswith("blocks.1."):
        return Work(sums)
    return original(reduction, gradients, sums)
