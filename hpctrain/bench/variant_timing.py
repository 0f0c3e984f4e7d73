"""Timing of several variants of a training step by turns within one run.

The speed of a machine changes within minutes, so that variants that ran one after the other could not be
compared. In each round every variant takes some steps; the order of two rounds is A B, B A.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hpctrain.bench.pipeline_prediction import StageProbe
from hpctrain.comm.world import World


@dataclass(frozen=True)
class TimedVariant:
    """Training step to time.

    Attributes:
        name: Name of the variant.
        step: Function that takes one step on all ranks. It returns the mean loss of the tokens for which this
            rank computes it; None if there are none.
        tokens: Share of this rank in the tokens of a step.
        phases: Function that returns the seconds in each phase since its last call.
        split: Number of blocks in each part of the model; empty for peers.
        probe: Measures the stages of a pipeline; None without pipeline stages.
        same_training: True if the step trains the global batch from the initial weights of the deck, so that
            its losses must equal those of other such variants.
        memory: Function that returns the peak bytes of the variant's own processes, see `PeerProcess.memory`;
            None if it has no such processes.
    """

    name: str
    step: Callable[[], float | None]
    tokens: float
    phases: Callable[[], dict[str, float]] = dict
    split: tuple[int, ...] = ()
    probe: StageProbe | None = None
    same_training: bool = True
    memory: Callable[[], tuple[int, int]] | None = None


@dataclass
class VariantTimes:
    """Measured times and losses of one variant.

    Attributes:
        variant: The variant.
        tokens_per_s: Tokens/s of all ranks together, by round.
        seconds: Seconds of each timed step on the slowest rank.
        losses: Mean loss of each step, from the untimed first step on.
        phases: Seconds per step in each phase on this rank.
    """

    variant: TimedVariant
    tokens_per_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)


def time_variants(
    world: World, variants: Sequence[TimedVariant], steps: int, rounds: int
) -> list[VariantTimes]:
    """Time `steps` steps of each variant in each round, after one untimed step of each. Collective.

    Every second round has the opposite order, so that effects of one variant on the next one, and a machine
    that becomes slower, affect all variants equally.
    """
    measured = [VariantTimes(variant) for variant in variants]
    for number in range(rounds + 1):
        for row in measured if number % 2 or not number else reversed(measured):
            _time_round(world, row, steps if number else 1, bool(number))
    for row in measured:
        row.phases = {phase: seconds / (steps * rounds) for phase, seconds in row.phases.items()}
    return measured


def _time_round(world: World, row: VariantTimes, steps: int, timed: bool) -> None:
    variant = row.variant
    world.everyone.barrier()
    variant.phases()
    seconds, losses = torch.zeros(steps, dtype=torch.float64), torch.zeros(2, steps, dtype=torch.float64)
    round_start = time.perf_counter()
    for step in range(steps):
        start = time.perf_counter()
        loss = variant.step()
        seconds[step] = time.perf_counter() - start
        if loss is not None:
            losses[0, step], losses[1, step] = loss, 1.0
    step_seconds = (time.perf_counter() - round_start) / steps
    phase_seconds = variant.phases()
    total, count = world.everyone.all_reduce(losses)
    row.losses += (total / count).tolist()
    if not timed:
        return
    # Sums of rates are right for independent ranks too. Ranks that wait for each other have the same time.
    rate = torch.tensor(variant.tokens / step_seconds, dtype=torch.float64)
    row.tokens_per_s.append(float(world.everyone.all_reduce(rate)))
    row.seconds += world.everyone.all_reduce(seconds, "max").tolist()
    for phase, duration in phase_seconds.items():
        row.phases[phase] = row.phases.get(phase, 0.0) + duration
    if variant.probe is not None:
        variant.probe(step_seconds, {phase: duration / steps for phase, duration in phase_seconds.items()})
