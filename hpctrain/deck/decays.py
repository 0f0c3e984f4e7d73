"""Forms of the learning rate after the warm-up. A new form takes an entry of `DECAYS`, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import cos, pi, sqrt
from types import MappingProxyType


@dataclass(frozen=True)
class DecaySpan:
    """Steps and bounds of a decay.

    Attributes:
        warmup: Steps of the warm-up, in which no decay is asked for its share.
        decay_steps: Step at which the decay is over, counted from 0, with the warm-up.
        cooldown: Last steps of `decay_steps`.
        floor: Lowest rate, as a share of the peak.
    """

    warmup: int
    decay_steps: int
    cooldown: int
    floor: float

    def falling(self, step: int, last: int) -> float:
        """Return which share of the `last` steps of the decay is over at a step: from 0 to 1."""
        fallen = step - (self.decay_steps - last)
        return min(1.0, max(0.0, fallen / max(1, last)))

    def between(self, left: float) -> float:
        """Return the rate, as a share of the peak, where a share of the way down to the floor is `left`."""
        return self.floor + (1.0 - self.floor) * left


@dataclass(frozen=True)
class DecayForm:
    """One form of the decay, and which keys it looks at.

    Attributes:
        share: Rate at a step (from 0, behind the warm-up) as a share of the peak.
        description: A few words for the reference of the deck; "" if the name says it.
        ends: True if it ends at `decay_steps`.
        has_floor: True if it falls to the floor.
        has_cooldown: True if it falls in the cooldown alone.
    """

    share: Callable[[DecaySpan, int], float]
    description: str = ""
    ends: bool = True
    has_floor: bool = True
    has_cooldown: bool = False


def _cosine(span: DecaySpan, step: int) -> float:
    done = span.falling(step, span.decay_steps - span.warmup)
    return span.between(0.5 * (1.0 + cos(pi * done)))


def _linear(span: DecaySpan, step: int) -> float:
    return span.between(1.0 - span.falling(step, span.decay_steps - span.warmup))


def _constant(span: DecaySpan, step: int) -> float:  # noqa: ARG001
    return 1.0


def _warmup_stable_decay(span: DecaySpan, step: int) -> float:
    """Stay at the peak (arXiv 2404.06395), then fall in a line (arXiv 2405.18392)."""
    return span.between(1.0 - span.falling(step, span.cooldown))


def _inverse_square_root(span: DecaySpan, step: int) -> float:
    """Give the n-th step, from 1, sqrt(warmup / n) (arXiv 1706.03762), a warm-up of 0 counting as 1."""
    return max(span.floor, sqrt(max(1, span.warmup) / (step + 1)))


DECAYS: Mapping[str, DecayForm] = MappingProxyType({
    "cosine": DecayForm(_cosine),
    "linear": DecayForm(_linear),
    "constant": DecayForm(_constant, ends=False, has_floor=False),
    "wsd": DecayForm(_warmup_stable_decay, "at the peak, then down in the cooldown", has_cooldown=True),
    "inverse-sqrt": DecayForm(_inverse_square_root, "1 / sqrt(step)", ends=False),
})  # fmt: skip
"""Forms by the name that a deck has for each."""

ENDLESS = tuple(name for name, form in DECAYS.items() if not form.ends)
"""Decays that know no last step: `decay_steps` says nothing of them."""

WITH_COOLDOWN = tuple(name for name, form in DECAYS.items() if form.has_cooldown)
"""Decays that look at `cooldown`."""
