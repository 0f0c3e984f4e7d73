"""Sentences about the limits of the step time and about the best change."""

from __future__ import annotations

from hpctrain.plan.time.advice import Advice, Gain
from hpctrain.plan.time.step_plan import StepPlan
from hpctrain.plan.time.time_text import WHAT
from hpctrain.units import format_bytes

LIMITS = {
    "computing": "computation",
    "memory": "memory bandwidth",
    "inside": "links inside nodes",
    "between": "links between nodes",
    "away": "transfers to hosts and disks",
    "fixed": "fixed times of operations and steps",
    "waiting": "pipeline bubble",
}
_LEAST = 5e-4
"""Smallest share of a step that is listed."""


def advice_lines(step: StepPlan, advice: Advice) -> list[str]:
    """Return sentences about the largest cause, the limits, and the best change."""
    cause, most = max(step.seconds_by_cause.items(), key=lambda each: each[1])
    savings = [f"{LIMITS[part]} {_percent(share)}" for part, share in advice.limits.items() if share > _LEAST]
    first = max(advice.limits, key=lambda part: advice.limits[part])
    best = advice.gain
    return [
        f"The largest part of a step is {WHAT[cause]} ({_percent(most / step.seconds)}); the main limit is "
        f"{LIMITS[first]}. Sensitivity, the time saved if a limit takes half its time: {', '.join(savings)}.",
        "No single change of layout, micro-batch size, schedule or recomputation is faster and fits."
        if best is None
        else f"Best single change: --set {best.change} ({gain_words(best)}).",
    ]


def gain_words(gain: Gain) -> str:
    """Return a clause such as "12% shorter, 1.2 GB more per rank, fits"."""
    size = format_bytes(abs(gain.more_bytes))
    memory = f"{size} {'more' if gain.more_bytes > 0 else 'less'} per rank" if gain.more_bytes else ""
    fits = "fits" if gain.fits else ""
    return ", ".join(filter(None, [f"{_percent(gain.share)} shorter", memory, fits]))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
