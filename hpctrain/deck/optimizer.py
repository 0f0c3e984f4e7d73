"""The keys of `[optimizer]`: how parameters follow gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from hpctrain.deck.key import Section, key

OWN_KEYS: Mapping[str, tuple[str, ...]] = {
    "adamw": ("beta1", "beta2", "epsilon"),
    "sgd": ("momentum", "nesterov"),
    "lion": ("beta1", "beta2"),
    "schedule-free": ("beta1", "beta2", "epsilon"),
    "muon": (
        *("beta1", "beta2", "epsilon", "momentum", "nesterov"),
        *("matrices", "match", "newton_schulz", "newton_schulz_steps", "others_rate"),
    ),
    "adafactor": ("beta1",),
    "adam-mini": ("beta1", "beta2", "epsilon"),
}
"""The keys that are for some optimizers alone."""

IN_BLOCKS = "muon", "adafactor", "adam-mini"
"""The optimizers that update parameters in blocks, such as whole matrices."""


class OptimizerSection(Section):
    """How parameters follow gradients."""

    name: Literal["adamw", "sgd", "lion", "schedule-free", "muon", "adafactor", "adam-mini"] = key(
        "Which optimizer; lion wants a peak 3 to 10 times below adamw's, and as much more weight decay.",
        "adamw",
    )
    beta1: float = key(
        "Decay of the gradients' mean (adafactor: updates'; lion's steps); schedule-free: share of averages.",
        derived="0.9, with adafactor 0: none",
        ge=0,
        lt=1,
    )
    beta2: float = key(
        "Decay of the gradient's square (adam-mini too), or of its mean as it is kept (lion).",
        derived="0.95, with lion 0.99, with schedule-free 0.999",
        ge=0,
        lt=1,
    )
    epsilon: float = key("Added to the root of the square (all but sgd, lion, adafactor).", 1e-8, gt=0)
    momentum: float = key(
        "Decay of the sum (sgd) or mean (muon) of gradients that parameters follow.",
        derived="0, with muon 0.95",
        ge=0,
        lt=1,
    )
    nesterov: bool = key(
        "Whether they follow it one step ahead (sgd, muon; Nesterov's momentum).",
        derived="false, with muon and a momentum true",
    )
    matrices: tuple[str, ...] = key(
        "Parameters whose matrices muon updates, by name; all others are adamw's.",
        ("blocks.*",),
        strict=False,
    )
    match: Literal["original", "adamw-rms"] = key(
        "The size of muon's steps: that of adamw's, 0.2 sqrt(max(n, m)), or sqrt(max(1, n / m)).", "adamw-rms"
    )
    newton_schulz: Literal["bf16", "fp32"] = key("Format in which muon orthogonalizes.", "bf16")
    newton_schulz_steps: int = key("Steps of its iteration.", 5, ge=1, le=99)
    others_rate: float = key(
        "Learning rate of what muon leaves to adamw, over that of the step.", 1.0, gt=0, le=1000
    )
    weight_decay: float = key(
        "Decoupled weight decay, x rate a step, with mup the same at any width; not on norms and biases.",
        0.1,
        ge=0,
        le=1000,
    )
    clip: float = key("Largest global gradient norm; larger ones are scaled down to it; 0: never.", 1.0, ge=0)
    restart: bool = key(
        "Whether to go on from a checkpoint of another optimizer, with new state of this one.", False
    )
