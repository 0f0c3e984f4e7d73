"""The keys of `[precision]`: number formats, and the matrix products in 8 bits."""

from __future__ import annotations

from typing import Literal

from hpctrain.deck.key import Section, key

_LONGEST_HISTORY = 100_000

SMALLEST_LOSS_SCALE, LARGEST_LOSS_SCALE = 2.0**-14, 2.0**24
"""Bounds of the loss scale."""


class PrecisionSection(Section):
    """Number formats. Master weights and moments are always fp32."""

    compute: Literal["fp32", "bf16", "fp16", "fp8"] = key(
        "Format of weights and activations; fp8: bf16, with linear layers (not experts) multiplying in "
        "8 bits.",
        "fp32",
    )
    gradients: Literal["fp32", "compute"] = key(
        "Format of gradient buffers; compute: the format of precision.compute, half the memory and "
        "communication.",
        "fp32",
    )
    fp8: Literal["tensor", "delayed", "row", "block", "mx"] = key(
        "Scaling granularity: a tensor (delayed: from maxima of earlier steps), a row, or blocks of a row.",
        "delayed",
    )
    fp8_history: int = key(
        "Number of earlier steps whose largest maximum gives the scale (delayed).",
        16,
        unit="steps",
        ge=1,
        le=_LONGEST_HISTORY,
    )
    fp8_gradients: Literal["e5m2", "e4m3"] = key(
        "8-bit format of the gradients of layer outputs; inputs and weights are in E4M3.", "e5m2"
    )
    fp8_exclude: tuple[str, ...] = key(
        'Layers, by name, that multiply in bf16, as embedding and output layer always do: ["blocks.0.*"].',
        (),
        strict=False,
    )
    fp8_watch: int = key(
        "Steps between metrics of the 8-bit quantization error and the scales; 0: none.",
        0,
        unit="steps",
        ge=0,
    )
    fp8_messages: bool = key(
        "Whether sequence_parallel sends inputs (tensor, delayed: gradients too) in 8 bits; results are "
        "the same.",
        False,
    )
    fp8_gather: bool = key(
        "Whether zero = 3 gathers weights in 8 bits (tensor, delayed); results are the same.", False
    )
    initial_loss_scale: float = key(
        "Initial loss scale; all loss scales are from 2^-14 to 2^24 (fp16 only).",
        65536.0,
        ge=SMALLEST_LOSS_SCALE,
        le=LARGEST_LOSS_SCALE,
    )
    loss_scale_window: int = key(
        "Steps without overflow after which the loss scale doubles (fp16 only).", 1000, unit="steps", ge=1
    )

    @property
    def words(self) -> str:
        """Format of computation, with the scaling of fp8, such as `bf16` or `fp8 (delayed)`."""
        return f"fp8 ({self.fp8})" if self.compute == "fp8" else self.compute
