"""Faults of products in 8 bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import hpctrain.parallel.fp8.product as fp8_product
import hpctrain.parallel.fp8.quantize as quantize
from hpctrain.parallel.fp8.history import History
from hpctrain.parallel.noted import Noted
from tests.train.layout_faults.deck_keys import DELAYED_SCALES, ONE_SCALE, ROW_SCALES, SEQUENCE, TENSOR
from tests.train.layout_faults.fault import LayoutFault
from tests.train.layout_faults.planting import scaled_result, skipped_calls, wrapped
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
            wrapped(fp8_product.QuantizedProduct, "_quantized", _quantize_gradients_as_e4m3, on_rank_1),
        ),
        fault(
            "maxima of the third micro-batch",
            DELAYED_SCALES,
            skipped_calls(Noted, "most", in_third_micro_batch),
        ),
        fault(
            "maxima that replace each other",
            DELAYED_SCALES,
            wrapped(History, "remember", _replace_newest_maximum, on_rank_1),
        ),
        fault(
            "a history of one rank",
            (*DELAYED_SCALES, *TENSOR),
            wrapped(History, "remember", double_maximum, on_rank_1),
        ),
        fault(
            "messages in 8 bits in another order",
            (*ONE_SCALE, *SEQUENCE, "precision.fp8_messages=true"),
            wrapped(
                fp8_product,
                "gathered",
                lambda original, own, pieces: replace(
                    original(own, pieces), values=original(own, pieces).values.flip(0)
                ),
            ),
        ),
    ]


def _replace_newest_maximum(original: Any, history: History, maximum: Tensor) -> None:
    history.maxima.copy_(torch.cat((maximum.reshape(1).to(history.maxima), history.maxima[1:])))


def _clamp_to_quarter(original: Any, values: Tensor, form: Any) -> Tensor:
    return original(values.clamp(-form.largest / 4, form.largest / 4), form)


def _quantize_gradients_as_e4m3(original: Any, product: Any, kind: str, *rest: Any, **options: Any) -> Any:
    form = product.gradient_form
    product.gradient_form = fp8_product.E4M3
    try:
        return original(product, kind, *rest, **options)
    finally:
        product.gradient_form = form
