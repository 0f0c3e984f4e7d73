"""Seconds of a step over a slow link, and the speed of links at which compression breaks even.

Each rank has a link of its own. Messages inside a node do not use it if several ranks share a node. The time
for which a rank waits for messages adds to the step. Reductions of gradients that start in the backward pass
run one after the other, each after its gradients are complete. The backward pass of the last micro-batch is
2/3 of the time of a micro-batch. What has not been sent at its end adds to the step. The synchronization of
local steps overlaps only with the steps of its delay.
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
"""Share of the backward pass in the time of a micro-batch: two of the three products of each matrix."""

SLOW_STEPS = 3
"""Number of first steps of a run that are ignored, since they take longer."""

_SLOWEST, _FASTEST = 125.0, 1e14
_HALVINGS = 100


@dataclass(frozen=True)
class LinkedStep:
    """Time of a step over a link.

    Attributes:
        computing: Seconds of the step without the link.
        moving: Seconds that the link adds.
    """

    computing: float
    moving: float

    @property
    def seconds(self) -> float:
        """Seconds of the complete step."""
        return self.computing + self.moving


def linked_step(traffic: TrafficPlan, link: Link, computing: float) -> LinkedStep:
    """Return the time of a step over a link, that of the slowest stage.

    Args:
        traffic: Traffic of the deck.
        link: The link.
        computing: Seconds of a step without the link.
    """
    window = BACKWARD * computing / traffic.micro_batches
    return LinkedStep(computing, max(_moving(stage, link, window, computing) for stage in traffic.stages))


def _moving(stage: StageTraffic, link: Link, window: float, computing: float) -> float:
    """Return the seconds for which a step waits for its link.

    Args:
        stage: Traffic of a pipeline stage.
        link: The link.
        window: Seconds of the last backward pass.
        computing: Seconds of a step without the link.
    """
    total = 0.0
    for step in stage.steps:
        free = later = 0.0
        ahead = max((transfer.ahead for transfer in step), default=0)
        for transfer in step:
            seconds = transfer.traffic.seconds(link)
            if transfer.start is None:
                total += seconds
            elif transfer.ahead:
                later += seconds
            elif seconds:
                free = max(free, transfer.start * window) + seconds
        total += max(0.0, free - window) + max(0.0, later - ahead * computing)
    return total / len(stage.steps)


def break_even(
    exact: TrafficPlan, other: TrafficPlan, latency: float, seconds: tuple[float, float]
) -> float | None:
    """Return the speed of links in bytes/s below which a step of `other` is faster than an exact one.

    Args:
        exact: Traffic with exact sums.
        other: Traffic of another form of communication.
        latency: Seconds of latency of the link.
        seconds: Seconds of a step of both without the link.

    Returns:
        The speed; None if `other` is never faster, inf if it always is.
    """

    def saved_seconds(speed: float) -> float:
        link = Link(speed, latency)
        return linked_step(exact, link, seconds[0]).seconds - linked_step(other, link, seconds[1]).seconds

    slow, fast = _SLOWEST, _FASTEST
    if saved_seconds(slow) <= 0:
        return None
    if saved_seconds(fast) > 0:
        return inf
    for _ in range(_HALVINGS):
        middle = (slow * fast) ** 0.5
        slow, fast = (middle, fast) if saved_seconds(middle) > 0 else (slow, middle)
    return slow


def measured_step(run_dir: Path) -> tuple[Deck, float]:
    """Return the deck of a run, and the median seconds of its steps without the first ones.

    Raises:
        InputOutputError: The run has too few steps.
        HpctrainError: The run emulated a link.
    """
    deck = read_stored_deck(run_dir / "deck.toml", CodeTrust())
    rows = read_metrics(run_dir / METRICS_FILE)
    if any("emulated_link" in row for row in rows):
        raise HpctrainError(
            f"{run_dir}: its times are those of an emulated link; use a run without communication.emulate"
        )
    seconds: Sequence[float] = [row["seconds"] for row in rows if isinstance(row.get("seconds"), int | float)]
    if len(seconds) <= SLOW_STEPS:
        raise InputOutputError(f"{run_dir}: has {len(seconds)} steps; more than {SLOW_STEPS} are required")
    return deck, median(seconds[SLOW_STEPS:])
