"""Faults of tensor and sequence parallel layers."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor

import hpctrain.model.transformer as transformer
import hpctrain.parallel.vocabulary as vocabulary
import hpctrain.sharding.synchronize as synchronize
from hpctrain.optim.optimizer import ResidentOptimizer
from hpctrain.parallel.random import DropoutSource
from hpctrain.parallel.tensor import ColumnLinear, RowLinear
from tests.train.layout_faults.deck_keys import DROPOUT, GPT2, SEQUENCE, TENSOR
from tests.train.layout_faults.fault import LayoutFault
from tests.train.layout_faults.planting import changed_results, scale, scaled_argument, swap_halves, wrapped
from tests.train.layout_faults.scene import Scene, in_third_micro_batch, on_rank_1
from tests.train.layout_faults.shared_changes import change_rate, use_local_positions

fault = partial(LayoutFault, "tensor")


def faults() -> list[LayoutFault]:
    """Return the faults of this seam."""
    return [
        fault(
            "a bias that each rank adds",
            (*TENSOR, *GPT2),
            scaled_argument(RowLinear, "_add_bias_gradients", 1, 2.0),
        ),
        fault(
            "a bias of half its gradient",
            (*TENSOR, *GPT2),
            scaled_argument(ColumnLinear, "_add_bias_gradients", 1, 0.5),
        ),
        fault("pieces in another order", SEQUENCE, changed_results("tensor", "all_gather", swap_halves)),
        fault(
            "pieces of the third micro-batch",
            SEQUENCE,
            changed_results("tensor", "reduce_scatter", scale(0.9), in_third_micro_batch),
        ),
        fault(
            "norms that are not summed",
            SEQUENCE,
            lambda s: s.patch.setattr(synchronize, "_partial_runs", lambda _: []),
        ),
        fault(
            "shared keys that are not summed",
            (*TENSOR, "model.key_value_heads=1"),
            lambda s: s.patch.setattr(synchronize, "_partial_runs", lambda _: []),
        ),
        fault("rows of the next token", TENSOR, _plant_in_lookup),
        fault(
            "sums over the vocabulary",
            TENSOR,
            changed_results("tensor", "all_gather", lambda values: values[1:, 1].mul_(0.9)),
        ),
        fault(
            "masks of another rank's rows",
            (*SEQUENCE, *DROPOUT),
            wrapped(DropoutSource, "mask", _mask_by_local_rows),
        ),
        fault(
            "positions of another rank's rows",
            (*SEQUENCE, *GPT2),
            wrapped(transformer.PositionEmbedding, "forward", use_local_positions),
        ),
        fault("an update of one rank", TENSOR, wrapped(ResidentOptimizer, "step", change_rate, on_rank_1)),
    ]


def _mask_by_local_rows(original: Any, source: Any, site: int, positions: Tensor, *rest: Any) -> Tensor:
    return original(source, site, positions - positions.min(), *rest)


def _look_up_next_row(original: Any, indices: Tensor, weight: Tensor) -> Tensor:
    return original((indices + 1) % len(weight), weight)


def _plant_in_lookup(scene: Scene) -> None:
    functional = SimpleNamespace(embedding=vocabulary.functional.embedding)
    scene.patch.setattr(vocabulary, "functional", functional)
    scene.around(functional, "embedding", _look_up_next_row, on_rank_1)
