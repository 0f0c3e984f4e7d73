"""Faults of products in 8 bits.

Scales are powers of two, so most faults of maxima change no number: the check compares the scales as well.
Padding that counts for maxima is not in this table. It changes a scale only where a row of padding holds the
largest value of a tensor, which depends on the weights.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import hpctrain.parallel.fp8.quantize as quantize
import hpctrain.sharding.eight_bit_gather as eight_bit_gather
from hpctrain.parallel.fp8.delayed_matmul import DelayedMatmul, MaximaHistory
from hpctrain.parallel.fp8.formats import E4M3, reducible_maximum
from hpctrain.parallel.fp8.quantize import QuantizedTensor, Scaling
from hpctrain.parallel.fp8.quantized_matmul import Dims, QuantizedMatmul
from hpctrain.parallel.step_statistics import StepStatistics
from tests.train.layout_faults.deck_keys import (
    CONTEXT,
    DELAYED_SCALES,
    FP8_GATHER,
    FP8_MESSAGES,
    MX_SCALES,
    ONE_SCALE,
    ROW_SCALES,
    TENSOR,
)
from tests.train.layout_faults.fault import LayoutFault
from tests.train.layout_faults.planting import scaled_argument, scaled_result, skipped_calls, wrapped
from tests.train.layout_faults.scene import in_third_micro_batch, on_rank_1
from tests.train.layout_faults.shared_changes import double_maximum

fault = partial(LayoutFault, "fp8")


def faults() -> list[LayoutFault]:
    """Return the faults of this seam."""
    return [
        fault("scales of one rank", ONE_SCALE, scaled_result(quantize, "scales_of", 16.0, on_rank_1)),
        fault(
            "a smaller range of numbers",
            ROW_SCALES,
            wrapped(quantize, "to_format", _clamp_to_quarter, on_rank_1),
        ),
        fault(
            "gradients in another format",
            ONE_SCALE,
            wrapped(QuantizedMatmul, "_quantize", _quantize_gradients_as_e4m3, on_rank_1),
        ),
        fault(
            "maxima of the third micro-batch",
            DELAYED_SCALES,
            skipped_calls(StepStatistics, "record_max", in_third_micro_batch),
        ),
        fault(
            "maxima that replace each other",
            DELAYED_SCALES,
            wrapped(MaximaHistory, "append", _replace_newest_maximum, on_rank_1),
        ),
        fault(
            "a history of one rank",
            (*DELAYED_SCALES, *TENSOR),
            wrapped(MaximaHistory, "append", double_maximum, on_rank_1),
        ),
        fault(
            "messages in 8 bits in another order",
            (*ONE_SCALE, *FP8_MESSAGES),
            wrapped(QuantizedTensor, "gather", _reverse_values),
        ),
        fault(
            "scales of messages in another order",
            (*ROW_SCALES, *FP8_MESSAGES),
            wrapped(QuantizedTensor, "gather", _reverse_scales),
        ),
        fault(
            "maxima of weights of one rank",
            (*ONE_SCALE, *TENSOR),
            wrapped(QuantizedMatmul, "set_weight_maxima", _keep_local_weight_maxima),
        ),
        fault(
            "maxima of a part of each row of weights",
            (*ROW_SCALES, *TENSOR),
            wrapped(QuantizedMatmul, "set_weight_maxima", _keep_local_weight_maxima),
        ),
        fault(
            "maxima of the tokens of one context rank",
            (*ONE_SCALE, *CONTEXT),
            wrapped(QuantizedMatmul, "_maxima", _keep_local_token_maxima),
        ),
        fault(
            "maxima of one piece of the sequence",
            (*ONE_SCALE, *FP8_MESSAGES),
            wrapped(QuantizedMatmul, "_maxima", _keep_local_token_maxima),
        ),
        fault(
            "gathered weights that one rank divides by another scale",
            (*ONE_SCALE, *FP8_GATHER),
            scaled_argument(eight_bit_gather, "_cast_into", 2, 2.0, on_rank_1),
        ),
        fault(
            "maxima of gathered weights that one rank does not tell",
            (*DELAYED_SCALES, *FP8_GATHER),
            skipped_calls(DelayedMatmul, "record_weight_maximum", on_rank_1),
        ),
        fault(
            "exponents of one rank",
            MX_SCALES,
            wrapped(quantize, "exponents_of", lambda original, scales: original(scales) + 1, on_rank_1),
        ),
        fault(
            "kept inputs of the third micro-batch",
            ROW_SCALES,
            wrapped(QuantizedMatmul, "saved_operand", _double_kept_scales, in_third_micro_batch),
        ),
    ]


def _reverse_values(original: Any, piece: QuantizedTensor, pieces: Any) -> QuantizedTensor:
    gathered = original(piece, pieces)
    return replace(gathered, values=gathered.values.flip(0))


def _reverse_scales(original: Any, piece: QuantizedTensor, pieces: Any) -> QuantizedTensor:
    gathered = original(piece, pieces)
    return replace(gathered, scales=gathered.scales.flip(0))


def _keep_local_weight_maxima(original: Any, product: QuantizedMatmul, dims: Dims, _: Tensor) -> None:
    original(product, dims, product.local_weight_maxima(dims))


def _keep_local_token_maxima(
    original: Any, product: QuantizedMatmul, kind: str, scaling: Scaling, matrix: Tensor, *rest: Any
) -> Tensor:
    if kind == "weights":
        return original(product, kind, scaling, matrix, *rest)
    return reducible_maximum(scaling.maxima(matrix))


def _double_kept_scales(original: Any, product: QuantizedMatmul, tensors: Any) -> Any:
    kept = original(product, tensors)
    return replace(kept, scales=2 * kept.scales) if isinstance(kept, QuantizedTensor) else kept


def _replace_newest_maximum(original: Any, history: MaximaHistory, maximum: Tensor) -> None:
    history.maxima.copy_(torch.cat((maximum.reshape(1).to(history.maxima), history.maxima[1:])))


def _clamp_to_quarter(original: Any, values: Tensor, form: Any) -> Tensor:
    return original(values.clamp(-form.largest / 4, form.largest / 4), form)


def _quantize_gradients_as_e4m3(original: Any, product: Any, kind: str, *rest: Any, **options: Any) -> Any:
    settings = product.settings
    product.settings = replace(settings, gradient_format=E4M3)
    try:
        return original(product, kind, *rest, **options)
    finally:
        product.settings = settings
