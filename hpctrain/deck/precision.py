"""The keys of `[precision]`: number formats, and how much is multiplied in 8 bits."""

from __future__ import annotations

from typing import Literal

from hpctrain.deck.key import Section, key

_LONGEST_HISTORY = 100_000

SMALLEST_LOSS_SCALE, LARGEST_LOSS_SCALE = 2.0**-14, 2.0**24
"""Between which a loss scale goes."""


class PrecisionSection(Section):
    """Number formats. Master weights and moments are always fp32."""

    compute: Literal["fp32", "bf16", "fp16", "fp8"] = key(
        "Format of weights and activations; fp8: bf16, but linear layers (no experts) multiply in 8 bits.",
        "fp32",
    )
    gradients: Literal["fp32", "compute"] = key(
        "Format of gradient buffers; compute: that of precision.compute, with half the memory and traffic.",
        "fp32",
    )
    fp8: Literal["tensor", "delayed", "row", "block", "mx"] = key(
        "What has a scale of its own: a tensor (delayed: by maxima of steps before), a row, or parts of it.",
        "delayed",
    )
    fp8_history: int = key(
        "Steps before whose largest maximum gives the scale (delayed).",
        16,
        unit="steps",
        ge=1,
        le=_LONGEST_HISTORY,
    )
    fp8_gradients: Literal["e5m2", "e4m3"] = key(
        "Format in 8 bits of gradients of what layers put out; inputs and weights are in E4M3.", "e5m2"
    )
    fp8_exclude: tuple[str, ...] = key(
        'Layers that multiply in bf16, by name, as embedding and head do anyway: ["blocks.0.*"].',
        (),
        strict=False,
    )
    fp8_watch: int = key(
        "A line of metrics tells what 8 bits lose, and scales, every so many steps; 0: none.",
        0,
        unit="steps",
        ge=0,
    )
    fp8_messages: bool = key(
        "Whether inputs (of one scale: gradients) travel in 8 bits under sequence_parallel; no bit changes.",
        False,
    )
    fp8_gather: bool = key(
        "Whether weights are gathered in 8 bits with zero = 3 (tensor, delayed); no bit changes.", False
    )
    initial_loss_scale: float = key(
        "First loss scale, from 2^-14 to 2^24 as all later ones (fp16 only).",
        65536.0,
        ge=SMALLEST_LOSS_SCALE,
        le=LARGEST_LOSS_SCALE,
    )
    loss_scale_window: int = key(
        "Steps without overflow after which the loss scale doubles (fp16 only).", 1000, unit="steps", ge=1
    )

    @property
    def words(self) -> str:
        """In what is computed: `bf16`, `fp8 (delayed)`."""
        return f"fp8 ({self.fp8})" if self.compute == "fp8" else self.compute
