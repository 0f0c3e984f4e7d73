"""Seconds of a step where a link is slow, and the speed of links at which less traffic breaks even.

Each rank has such a link to all others (those of its node apart, where it has company there). What it waits
for adds to the step. Sums of gradients that are started in backward move meanwhile, one after the other, each
from when its share of the gradients was there; the backward pass of the last micro-batch takes 2/3 of a
micro-batch, and what has not moved by its end adds to the step too. Local steps overlap with nothing but by
their own delay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median

from hpctrain.deck.code import CodeTrust
from hpctrain.deck.read import read_stored_deck
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.plan.traffic_plan import StageTraffic, TrafficPlan
from hpctrain.report.metric_rows import METRICS_FILE, read_metrics
from hpctrain.units import Link

BACKWARD = 2 / 3
"""Of the time of a micro-batch: two of its three products of each matrix."""

WARMING = 3
"""The first steps of a run, which take longer than the others."""

_SLOWEST, _FASTEST = 125.0, 1e14
_HALVINGS = 100


@dataclass(frozen=True)
class LinkedStep:
    """A step over a link: the seconds it takes without one, and those that the link adds."""

    computing: float
    moving: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.computing + self.moving


def linked_step(traffic: TrafficPlan, link: Link, computing: float) -> LinkedStep:
    """A step of a deck that takes so long where links are fast, over this one: that of the slowest stage."""
    window = BACKWARD * computing / traffic.micro_batches
    return LinkedStep(computing, max(_moving(stage, link, window, computing) for stage in traffic.stages))


def _moving(stage: StageTraffic, link: Link, window: float, computing: float) -> float:
    """Seconds that a step waits for its link, beside `window` seconds of backward, and steps `computing`."""
    total = 0.0
    for step in stage.steps:
        free = later = 0.0
        ahead = max((moved.ahead for moved in step), default=0)
        for moved in step:
            took = moved.traffic.seconds(link)
            if moved.begun is None:
                total += took
            elif moved.ahead:
                later += took
            elif took:
                free = max(free, moved.begun * window) + took
        total += max(0.0, free - window) + max(0.0, later - ahead * computing)
    return total / len(stage.steps)


def break_even(
    exact: TrafficPlan, other: TrafficPlan, latency: float, seconds: tuple[float, float]
) -> float | None:
    """The speed of links, in bytes a second, below which a step of `other` is quicker than an exact one.

    `seconds` are those of both without a link. None where it is quicker at no speed; infinite where it is at
    any.
    """

    def gained(speed: float) -> float:
        link = Link(speed, latency)
        return linked_step(exact, link, seconds[0]).seconds - linked_step(other, link, seconds[1]).seconds

    slow, fast = _SLOWEST, _FASTEST
    if gained(slow) <= 0:
        return None
    if gained(fast) > 0:
        return inf
    for _ in range(_HALVINGS):
        middle = (slow * fast) ** 0.5
        slow, fast = (middle, fast) if gained(middle) > 0 else (slow, middle)
    return slow


def measured_step(run_dir: Path) -> tuple[Deck, float]:
    """The deck of a run, and the median of its steps' seconds, the first ones apart.

    InputOutputError where it has none; HpctrainError where they are those of a link that is not there.
    """
    deck = read_stored_deck(run_dir / "deck.toml", CodeTrust())
    rows = read_metrics(run_dir / METRICS_FILE)
    if any("emulated_link" in row for row in rows):
        raise HpctrainError(
            f"{run_dir}: its times are those of an emulated link; use a run without communication.emulate"
        )
    seconds: Sequence[float] = [row["seconds"] for row in rows if isinstance(row.get("seconds"), int | float)]
    if len(seconds) <= WARMING:
        raise InputOutputError(f"{run_dir}: has {len(seconds)} steps; more than {WARMING} are required")
    return deck, median(seconds[WARMING:])
