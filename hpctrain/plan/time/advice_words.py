"""What limits a step, and what would help most, in sentences."""

from __future__ import annotations

from hpctrain.plan.time.advice import Advice, Gain
from hpctrain.plan.time.step import StepPlan
from hpctrain.plan.time.words import WHAT
from hpctrain.units import format_bytes

LIMITS = {
    "computing": "computing",
    "memory": "memory bandwidth",
    "inside": "links inside nodes",
    "between": "links between nodes",
    "away": "ways to hosts and disks",
    "fixed": "what operations and steps take at least",
    "waiting": "waiting for other stages",
}
_LEAST = 5e-4  # of a step: less is not told


def advice_lines(step: StepPlan, advice: Advice) -> list[str]:
    """The largest cause, how much shorter a step were with each part twice as fast, and the best change."""
    cause, most = max(step.seconds_by_cause.items(), key=lambda each: each[1])
    told = [f"{LIMITS[part]} {_percent(share)}" for part, share in advice.limits.items() if share > _LEAST]
    first = max(advice.limits, key=lambda part: advice.limits[part])
    best = advice.gain
    return [
        f"{_percent(most / step.seconds)} of a step is {WHAT[cause]}; what limits it is {LIMITS[first]}. "
        f"A step would be shorter, with each by itself in half its time: {', '.join(told)}.",
        "No single change of its layout, micro-batch, schedule or recomputation makes it shorter and fits."
        if best is None
        else f"What would help most: --set {best.change} ({gain_words(best)}).",
    ]


def gain_words(gain: Gain) -> str:
    """`12% shorter, 1.2 GB more a rank, fits`."""
    size = format_bytes(abs(gain.more_bytes))
    held = f"{size} {'more' if gain.more_bytes > 0 else 'less'} a rank" if gain.more_bytes else ""
    fits = "fits" if gain.fits else ""
    return ", ".join(filter(None, [f"{_percent(gain.share)} shorter", held, fits]))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
