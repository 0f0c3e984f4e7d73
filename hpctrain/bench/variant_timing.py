"""Things that are timed in turns within one run, since machines drift: A B B A, by rounds of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hpctrain.bench.pipeline_prediction import StageProbe
from hpctrain.comm.world import World


@dataclass(frozen=True)
class TimedVariant:
    """Something to time: `step` does one step on all ranks and gives the loss of this rank's tokens, where it
    has any; `tokens` is this rank's part of a step's tokens.

    `phases` gives the seconds spent in each phase since it was last asked. `split` are the blocks of each
    part of the model; `probe` measures the stages of a pipeline. `alike` says that it trains the batch as a
    whole from the deck's first weights. `memory` tells the peaks of a process of its own, see PeerProcess.
    """

    name: str
    step: Callable[[], float | None]
    tokens: float
    phases: Callable[[], dict[str, float]] = dict
    split: tuple[int, ...] = ()
    probe: StageProbe | None = None
    alike: bool = True
    memory: Callable[[], tuple[int, int]] | None = None


@dataclass
class VariantTimes:
    """Of one variant: tokens/s of all ranks together by round, seconds of every step by the slowest rank, the
    mean loss of every step from the very first one on, and seconds of a step by phase on this rank.
    """

    variant: TimedVariant
    tokens_per_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)


def take_turns(world: World, variants: Sequence[TimedVariant], steps: int, rounds: int) -> list[VariantTimes]:
    """Rounds of `steps` steps of each variant, after one step each that is not timed. Collective.

    Every second round goes through the variants in the opposite order, so that what one leaves to the next,
    and a machine that becomes slower and slower, meet all alike.
    """
    measured = [VariantTimes(variant) for variant in variants]
    for turn in range(rounds + 1):
        for row in measured if turn % 2 or not turn else reversed(measured):
            _take_turn(world, row, steps if turn else 1, bool(turn))
    for row in measured:
        row.phases = {phase: seconds / (steps * rounds) for phase, seconds in row.phases.items()}
    return measured


def _take_turn(world: World, row: VariantTimes, steps: int, timed: bool) -> None:
    variant = row.variant
    world.everyone.barrier()
    variant.phases()
    seconds, losses = torch.zeros(steps, dtype=torch.float64), torch.zeros(2, steps, dtype=torch.float64)
    began = time.perf_counter()
    for step in range(steps):
        started = time.perf_counter()
        loss = variant.step()
        seconds[step] = time.perf_counter() - started
        if loss is not None:
            losses[0, step], losses[1, step] = loss, 1.0
    taken = (time.perf_counter() - began) / steps
    spent = variant.phases()
    total, count = world.everyone.all_reduce(losses)
    row.losses += (total / count).tolist()
    if not timed:
        return
    # Ranks that wait for each other take as long as the slowest; independent ones add up.
    rate = torch.tensor(variant.tokens / taken, dtype=torch.float64)
    row.tokens_per_s.append(float(world.everyone.all_reduce(rate)))
    row.seconds += world.everyone.all_reduce(seconds, "max").tolist()
    for phase, part in spent.items():
        row.phases[phase] = row.phases.get(phase, 0.0) + part
    if variant.probe is not None:
        variant.probe(taken, {phase: part / steps for phase, part in spent.items()})
