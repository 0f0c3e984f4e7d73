"""Text about an evaluation: a line during training, and a note below the table of `hpctrain status`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_ONE_DECIMAL = 1000.0
"""Perplexity from which on it has one decimal."""

_EXPONENT = 1e9
"""Perplexity from which on it has an exponent."""

_NOTABLE = ("reward", "accuracy", "kl")


def evaluation_line(name: str, metrics: Mapping[str, float]) -> str:
    """Return the metrics of an evaluated set on one line.

    Args:
        name: Name of the set.
        metrics: Metrics of the set, with the loss in nats per token.
    """
    words = [f"{name} loss {metrics['loss']:.4f}"]
    if "perplexity" in metrics:
        perplexity = metrics["perplexity"]
        form = ".3f" if perplexity < _ONE_DECIMAL else ".1f" if perplexity < _EXPONENT else ".1e"
        words.append(f"perplexity {perplexity:{form}}")
    if "bits_per_byte" in metrics:
        words.append(f"{metrics['bits_per_byte']:.4f} bits/byte")
    return "  ".join([*words, *notable_metrics(metrics)])


def notable_metrics(metrics: Mapping[str, float]) -> list[str]:
    """Return the metrics that show better than the loss what was learned, if the objective has them."""
    return [f"{name} {metrics[name]:.4f}" for name in _NOTABLE if name in metrics]


def evaluation_note(status: Mapping[str, Any]) -> list[str]:
    """Return a note on the newest evaluation of a run's status and the lowest loss; [] if there is none."""
    evaluated, best = status.get("evaluated"), status.get("best") or {}
    if not isinstance(evaluated, dict) or not isinstance(evaluated.get("sets"), dict):
        return []
    sets = {
        name: {metric: math.nan if value is None else value for metric, value in metrics.items()}
        for name, metrics in evaluated["sets"].items()
    }
    sets_text = "; ".join(evaluation_line(name, metrics) for name, metrics in sets.items())
    lowest = ""
    if best.get("step") and best["step"] != evaluated["step"]:
        lowest = f"; lowest {best['of']} loss {best['loss']:.4f} after step {best['step']}"
    return [f"after step {evaluated['step']} {sets_text}{lowest}"]
