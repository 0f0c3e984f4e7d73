"""What is said of an evaluation: on a line while a run trains, and below the table of `hpctrain status`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_MANY = 1000.0  # from here on a perplexity has one decimal
_MOST = 1e9  # and from here on it is told by its magnitude
_NOTABLE = ("reward", "accuracy", "kl")


def evaluation_words(name: str, figures: Mapping[str, float]) -> str:
    """Figures of a set that was evaluated, the loss in nats per token, on one line."""
    words = [f"{name} loss {figures['loss']:.4f}"]
    if "perplexity" in figures:
        perplexity = figures["perplexity"]
        form = ".3f" if perplexity < _MANY else ".1f" if perplexity < _MOST else ".1e"
        words.append(f"perplexity {perplexity:{form}}")
    if "bits_per_byte" in figures:
        words.append(f"{figures['bits_per_byte']:.4f} bits/byte")
    return "  ".join([*words, *notable_words(figures)])


def notable_words(figures: Mapping[str, float]) -> list[str]:
    """Those figures that say better than the loss what was learned, where an objective has them."""
    return [f"{name} {figures[name]:.4f}" for name in _NOTABLE if name in figures]


def evaluated_note(status: Mapping[str, Any]) -> list[str]:
    """The newest evaluation that a run's status tells of, and the lowest loss so far; nothing without any."""
    evaluated, best = status.get("evaluated"), status.get("best") or {}
    if not isinstance(evaluated, dict) or not isinstance(evaluated.get("sets"), dict):
        return []
    sets = {
        name: {figure: math.nan if value is None else value for figure, value in figures.items()}
        for name, figures in evaluated["sets"].items()
    }
    told = "; ".join(evaluation_words(name, figures) for name, figures in sets.items())
    lowest = ""
    if best.get("step") and best["step"] != evaluated["step"]:
        lowest = f"; lowest {best['of']} loss {best['loss']:.4f} after step {best['step']}"
    return [f"after step {evaluated['step']} {told}{lowest}"]
