"""Forms of the learning rate's decay after the warm-up. To add a form, add an entry to `DECAYS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import cos, pi, sqrt
from types import MappingProxyType


@dataclass(frozen=True)
class DecaySpan:
    """Steps and bounds of a decay.

    Attributes:
        warmup: Number of steps of the warm-up. The decay begins after them.
        decay_steps: Step (from 0, including the warm-up) at which the decay ends.
        cooldown: Number of the last steps before `decay_steps` in which a "wsd" decay falls.
        floor: Lowest rate, as a fraction of the peak.
    """

    warmup: int
    decay_steps: int
    cooldown: int
    floor: float

    def progress(self, step: int, last: int) -> float:
        """Return the fraction, in [0, 1], that is over at `step` of the final part of the decay.

        It is 0 before that part and 1 after it.

        Args:
            step: Step of the run, counted from 0 with the warm-up.
            last: Length in steps of the final part, which ends at `decay_steps`. With 0, the result is 0 up
                to the step `decay_steps`, and 1 after it.
        """
        passed = step - (self.decay_steps - last)
        return min(1.0, max(0.0, passed / max(1, last)))

    def interpolate(self, fraction: float) -> float:
        """Return the rate, as a fraction of the peak, between the floor (`fraction` 0) and the peak (1)."""
        return self.floor + (1.0 - self.floor) * fraction


@dataclass(frozen=True)
class DecayForm:
    """One form of the decay, and the keys that it uses.

    Attributes:
        rate: Function that returns the rate at a step (from 0, after the warm-up) as a fraction of the peak.
        description: Phrase for the reference of the deck; "" if the name explains itself.
        ends: True if the form uses `decay_steps`.
        has_floor: True if it uses `floor`.
        has_cooldown: True if it uses `cooldown`.
    """

    rate: Callable[[DecaySpan, int], float]
    description: str = ""
    ends: bool = True
    has_floor: bool = True
    has_cooldown: bool = False


def _cosine(span: DecaySpan, step: int) -> float:
    progress = span.progress(step, span.decay_steps - span.warmup)
    return span.interpolate(0.5 * (1.0 + cos(pi * progress)))


def _linear(span: DecaySpan, step: int) -> float:
    return span.interpolate(1.0 - span.progress(step, span.decay_steps - span.warmup))


def _constant(span: DecaySpan, step: int) -> float:  # noqa: ARG001
    return 1.0


def _warmup_stable_decay(span: DecaySpan, step: int) -> float:
    """Stay at the peak (arXiv 2404.06395), then fall linearly to the floor (arXiv 2405.18392)."""
    return span.interpolate(1.0 - span.progress(step, span.cooldown))


def _inverse_square_root(span: DecaySpan, step: int) -> float:
    """Return sqrt(warmup / n) for the n-th step, from 1 (arXiv 1706.03762). A warm-up of 0 counts as 1."""
    return max(span.floor, sqrt(max(1, span.warmup) / (step + 1)))


DECAYS: Mapping[str, DecayForm] = MappingProxyType({
    "cosine": DecayForm(_cosine),
    "linear": DecayForm(_linear),
    "constant": DecayForm(_constant, ends=False, has_floor=False),
    "wsd": DecayForm(_warmup_stable_decay, "stays at the peak until the cooldown", has_cooldown=True),
    "inverse-sqrt": DecayForm(_inverse_square_root, "1 / sqrt(step)", ends=False),
})  # fmt: skip
"""Forms by their names in a deck."""

ENDLESS = tuple(name for name, form in DECAYS.items() if not form.ends)
"""Names of the decays without a last step, which do not use `decay_steps`."""

WITH_COOLDOWN = tuple(name for name, form in DECAYS.items() if form.has_cooldown)
"""Names of the decays that use `cooldown`."""
