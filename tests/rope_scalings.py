"""Scalings of rotary positions for tests, which change all positions of sequences of 24 tokens."""

from __future__ import annotations

from typing import Any

from hpctrain.checkpoint.exchange.hugging_face.rope_parameters import rope_config
from hpctrain.deck.sections.rope_scaling import RopeScaling

SCALINGS: dict[str, RopeScaling] = {
    "linear": RopeScaling(kind="linear", factor=3.0),
    "dynamic": RopeScaling(kind="dynamic", factor=2.5, original_sequence=12),
    "llama3": RopeScaling(kind="llama3", factor=8.0, original_sequence=16, low_frequency_factor=0.5),
    "yarn": RopeScaling(kind="yarn", factor=4.0, original_sequence=12, beta_fast=2.0, beta_slow=0.1),
    "yarn-rough": RopeScaling(
        kind="yarn", factor=4.0, original_sequence=12, beta_slow=0.3, truncate=False, attention_factor=1.7
    ),
    "longrope": RopeScaling(
        kind="longrope",
        factor=4.0,
        original_sequence=12,
        short_factors=(1.0, 1.1, 1.2, 1.5),
        long_factors=(1.0, 2.0, 3.0, 4.5),
    ),
}
"""Scalings for heads of 8 features."""

YARN_KEYS = (
    "model.rope_scaling.kind=yarn",
    "model.rope_scaling.factor=4",
    "model.rope_scaling.original_sequence=8",
    "model.rope_scaling.beta_fast=2",
    "model.rope_scaling.beta_slow=0.1",
)
LONGROPE_KEYS = (
    "model.rope_scaling.kind=longrope",
    "model.rope_scaling.factor=4",
    "model.rope_scaling.original_sequence=4",
    "model.rope_scaling.short_factors=[1, 1.5, 2]",
    "model.rope_scaling.long_factors=[1, 3, 4.5]",
)
"""Keys of a deck; those of longrope are for heads of 6 features."""


def hf_rope_parameters(scaling: RopeScaling | None, base: float) -> dict[str, Any]:
    """Return the value of rope_parameters in a config.json of `transformers`."""
    parameters: dict[str, Any] = rope_config(base, scaling)["rope_parameters"]
    return parameters
