"""Faults of gradient accumulation over micro-batches."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

import hpctrain.parallel.vocabulary as vocabulary
from hpctrain.parallel.random import DropoutSource
from hpctrain.parallel.tensor import ColumnLinear, SplitLinear
from hpctrain.train.step import Step
from tests.train.layout_faults.deck_keys import DROPOUT, GPT2
from tests.train.layout_faults.fault import LayoutFault
from tests.train.layout_faults.planting import scaled_argument, wrapped
from tests.train.layout_faults.scene import Scene, in_third_micro_batch, on_rank_1
from tests.train.layout_faults.shared_changes import count_one_token_more, mask_by_next_site

fault = partial(LayoutFault, "accumulation")


def faults() -> list[LayoutFault]:
    """Return the faults of this seam."""
    return [
        fault(
            "a layer's third micro-batch",
            (),
            scaled_argument(SplitLinear, "_add_gradients", 1, 0.0, in_third_micro_batch),
        ),
        fault(
            "a layer's first micro-batch twice",
            (),
            scaled_argument(SplitLinear, "_add_gradients", 1, 2.0, lambda s: s.micro_batch == 0),
        ),
        fault(
            "gradients that are overwritten",
            (),
            wrapped(SplitLinear, "_add_gradients", _overwrite_gradient, in_third_micro_batch),
        ),
        fault(
            "sums in 16 bits",
            (),
            wrapped(SplitLinear, "_add_gradients", _round_gradient, lambda scene: scene.micro_batch == 1),
        ),
        fault(
            "biases of the third micro-batch",
            GPT2,
            scaled_argument(ColumnLinear, "_add_bias_gradients", 1, 0.0, in_third_micro_batch),
        ),
        fault("rows that fill up predict", (), wrapped(Step, "read", _let_padding_predict)),
        fault("a token too many", (), wrapped(Step, "read", count_one_token_more)),
        fault(
            "masks of the first micro-batch", DROPOUT, wrapped(Step, "dropout_source", _use_first_micro_batch)
        ),
        fault(
            "masks of the third micro-batch",
            (*DROPOUT, "memory.recompute=full"),
            wrapped(DropoutSource, "mask", mask_by_next_site, in_third_micro_batch),
        ),
        fault("lookups of the third micro-batch", (), _plant_in_lookup_gradient),
        fault("the loss of the third micro-batch", (), scaled_argument(Step, "prepare", 2, 0.5, on_rank_1)),
    ]


def _let_padding_predict(original: Any, step: Step, micro_batches: Any) -> Any:
    read = original(step, micro_batches)
    for micro in read.micro_batches:
        micro.fields["targets"][micro.present :] = 1
    return read


def _round_gradient(original: Any, layer: SplitLinear, *rest: Any) -> None:
    original(layer, *rest)
    gradient = layer.weights[0].gradient
    if gradient is not None:
        gradient.copy_(gradient.bfloat16())


def _overwrite_gradient(original: Any, layer: SplitLinear, *rest: Any) -> None:
    if layer.weights[0].gradient is not None:
        layer.weights[0].gradient.zero_()
    original(layer, *rest)


def _use_first_micro_batch(original: Any, step: Step, state: Any, _: int) -> Any:
    return original(step, state, 0)


def _plant_in_lookup_gradient(scene: Scene) -> None:
    original = vocabulary._EmbeddingAutograd.backward

    def backward(ctx: Any, gradient: Tensor) -> Any:
        return original(ctx, gradient * (1.5 if scene.in_layout and in_third_micro_batch(scene) else 1))

    scene.patch.setattr(vocabulary._EmbeddingAutograd, "backward", staticmethod(backward))
