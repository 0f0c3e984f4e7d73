"""V-shaped schedules: ZB-V (Qi et al., arXiv 2401.10241), V-Half and V-Min (Qi et al., arXiv 2405.15362).

Each stage holds two parts of the model, so that a micro-batch passes the stages down and then up again. The
first stage computes the loss, and all stages hold about the same amount of activations. The papers give
orders for passes that take equally long, and search for others. This module searches for all three, with any
times. They differ only in their limit of activations.

A schedule repeats one building block, which is the path of one micro-batch, once per period. The period is
the time of its work on a stage. The slower the micro-batch moves, the longer its activations are live, and
the fewer micro-batches fit. The search draws building blocks at random with a fixed seed, makes schedules of
them with `list_scheduling`, and keeps the fastest one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from hpctrain.errors import HpctrainError
from hpctrain.pipeline.action import Action, Kind, Schedule, number_actions
from hpctrain.pipeline.list_scheduling import (
    FORWARD_0,
    FORWARD_1,
    GRADIENT_0,
    GRADIENT_1,
    STREAMS,
    ListPriorities,
    list_schedule,
)
from hpctrain.pipeline.simulate import PartTimes, StageTimes, peak_activations, simulate, times_by_part
from hpctrain.pipeline.v_bound import minimum_cost

_MAX_CANDIDATES = 320
"""Largest number of building blocks that a search tries."""
_MAX_PLACED_ACTIONS = 320_000
"""Largest number of actions in all tried schedules together, which take about a second."""
_FINALISTS = 4
"""Number of building blocks that are tried with all micro-batches."""
_ROUNDING = 1e-9
"""Relative difference of times that counts as a rounding error."""
_GAIN = 0.01
"""Smallest possible gain for which a search runs: distance of the fixed order from the bound, relative."""


LIMITS: Mapping[str, Callable[[int], int]] = {
    # As many as stage 0 of 1F1B. No bubble if passes take equally long and micro-batches are 2 p or more.
    "zb-v": lambda stages: stages,
    # About half of 1F1B's bubble.
    "v-half": lambda stages: (stages + 2) // 2,
    # About two thirds of 1F1B's bubble.
    "v-min": lambda stages: (stages + 4) // 3,
}
"""By schedule: micro-batches whose activations a stage may hold, as a function of the number of stages."""


@dataclass(frozen=True)
class _BuildingBlock:
    """Path of one micro-batch in relative units, and the parameters of the list scheduling.

    Attributes:
        lifetime_share: Fraction of the longest lifetime that the limit allows, for chunk 0 and chunk 1.
        forward_share: Fraction of the slack in this lifetime that is spent in forward, for chunk 0 and chunk
            1.
        idle_times: Idle times on the path, in times of the busiest stage's work for one micro-batch: after
            forward of chunk 0 at the last stage, after forward of chunk 1 at the first stage, and after
            backward of chunk 1 at the last stage.
        period_factor: Time from one micro-batch to the next, divided by the shortest time that work and
            memory allow.
        patience: As in ListPriorities.
        finish_first: As in ListPriorities.
    """

    lifetime_share: tuple[float, float] = (1.0, 1.0)
    forward_share: tuple[float, float] = (0.5, 0.5)
    idle_times: tuple[float, float, float] = (0.0, 0.0, 0.0)
    period_factor: float = 1.0
    patience: float = 0.5
    finish_first: bool = False


def search_v_schedule(
    name: str, stages: int, micro_batches: int, times: StageTimes, memory_limit: float | None
) -> Schedule:
    """Return the fastest V-shaped schedule that the search finds within a limit of activations.

    The result depends only on the arguments, so that all ranks find the same one.

    Args:
        name: "zb-v", "v-half" or "v-min".
        stages: Number of stages.
        micro_batches: Number of micro-batches.
        times: Times of the stages.
        memory_limit: Number of micro-batches whose activations a stage may hold; None for that of LIMITS.

    Raises:
        HpctrainError: A single micro-batch exceeds the limit.
    """
    memory_limit = LIMITS[name](stages) if memory_limit is None else memory_limit
    limit = math.floor(2 * memory_limit + _ROUNDING)  # a chunk has half of a stage's activations
    if limit < 2:
        raise HpctrainError(
            f"{name}: the limit of activations of {memory_limit:g} micro-batches must be 1 or more"
        )
    shape = Schedule(((Action("F", 0, 0), Action("F", 0, 1)),) * stages, name, "v")
    part_times = times_by_part(times, shape)
    least = minimum_cost(part_times, micro_batches, limit)
    best = _zb_v(stages, micro_batches)
    if 2 * max(peak_activations(best)) > limit:
        best = _sequential(stages, micro_batches)
    cost = simulate(best, times).cost
    if cost > least * (1 + _GAIN):
        # Blocks that are good for slightly more micro-batches than fill the pipeline are good for many.
        for block in _explore(part_times, min(micro_batches, 2 * stages + 4), limit):
            plan = _block_priorities(block, part_times, micro_batches, limit)
            result = list_schedule(plan, part_times, micro_batches, limit, cost * (1 - _ROUNDING))
            if result is not None:
                cost, best = result
    return replace(best, name=name)


@lru_cache(maxsize=64)
def _explore(times: PartTimes, trial: int, limit: int) -> list[_BuildingBlock]:
    """Return the best building blocks for `trial` micro-batches, best first.

    Half of the candidates are random, the others are perturbations of the best ones so far.
    """
    least = minimum_cost(times, trial, limit)
    candidates = max(4, min(_MAX_CANDIDATES, _MAX_PLACED_ACTIONS // (6 * times.stages * trial)))
    generator = random.Random(0)
    best: list[tuple[float, int, _BuildingBlock]] = []

    def attempt(number: int, block: _BuildingBlock) -> None:
        bound = best[-1][0] if len(best) == _FINALISTS else math.inf
        result = list_schedule(_block_priorities(block, times, trial, limit), times, trial, limit, bound)
        if result is not None:
            best.append((result[0], number, block))
            best.sort(key=lambda entry: entry[:2])
            del best[_FINALISTS:]

    for number, block in enumerate(_draw_blocks(generator, candidates // 2)):
        attempt(number, block)
    for number in range(candidates - candidates // 2):
        if not best or best[0][0] <= least * (1 + _ROUNDING):
            break
        parent = best[min(number % 6 // 2, len(best) - 1)][2]
        attempt(candidates + number, _perturb(generator, parent))
    return [block for _, _, block in best]


def _draw_blocks(generator: random.Random, count: int) -> Iterator[_BuildingBlock]:
    yield from [
        _BuildingBlock(),
        _BuildingBlock(lifetime_share=(0.0, 0.0)),
        _BuildingBlock(forward_share=(0.0, 1.0)),
    ][:count]
    for _ in range(count - 3):
        draws = [generator.random() for _ in range(12)]
        tight = draws[0] < 0.3
        yield _BuildingBlock(
            lifetime_share=(0.0, 0.0) if tight else (0.6 + 0.6 * draws[1], 0.6 + 0.6 * draws[2]),
            forward_share=(draws[3], draws[4]),
            idle_times=(max(0.0, 3 * draws[5] - 2), max(0.0, 2 * draws[6] - 1), max(0.0, 3 * draws[7] - 2)),
            period_factor=1.0 if draws[8] < 0.6 else 0.9 + 0.4 * draws[9],
            patience=draws[10],
            finish_first=draws[11] < 0.5,
        )


def _perturb(generator: random.Random, block: _BuildingBlock) -> _BuildingBlock:
    def perturb(value: float, width: float) -> float:
        draw = generator.random()
        return value if draw < 0.4 else max(0.0, value + width * (generator.random() - 0.5))

    lifetime, forward, idle = block.lifetime_share, block.forward_share, block.idle_times
    return replace(
        block,
        lifetime_share=(perturb(lifetime[0], 0.3), perturb(lifetime[1], 0.3)),
        forward_share=(min(1.0, perturb(forward[0], 0.5)), min(1.0, perturb(forward[1], 0.5))),
        idle_times=(perturb(idle[0], 0.2), perturb(idle[1], 0.3), perturb(idle[2], 0.2)),
        patience=min(1.0, perturb(block.patience, 0.3)),
    )


def _block_priorities(
    block: _BuildingBlock, times: PartTimes, micro_batches: int, limit: int
) -> ListPriorities:
    """Return the time of each action if the building block were repeated without conflicts, as priority."""
    stages = times.stages
    mean_communication = math.fsum(times.communication) / max(1, 2 * stages - 2)
    fastest_forward = math.fsum(times.forward) / (2 * stages) + mean_communication
    fastest_backward = math.fsum(times.input_gradient) / (2 * stages) + mean_communication
    fastest = fastest_forward + fastest_backward
    work = max(math.fsum(times.stage_durations(stage)) for stage in range(stages))
    period = max(work, 2 * stages * fastest / limit) * block.period_factor
    # On every stage, activations are live for 2 p times the time of one forward and one backward hop.
    longest = limit * work / (2 * stages)
    slack = [max(0.0, longest * share - fastest) for share in block.lifetime_share]
    forward = [fastest_forward + s * share for s, share in zip(slack, block.forward_share, strict=True)]
    backward = [
        fastest_backward + s * (1 - share) for s, share in zip(slack, block.forward_share, strict=True)
    ]
    forward_0_end = stages * forward[0] + block.idle_times[0] * work
    forward_1_end = forward_0_end + stages * forward[1] + block.idle_times[1] * work
    gradient_1_end = forward_1_end + stages * backward[1] + block.idle_times[2] * work
    priorities = []
    for stage in range(stages):
        after = stages - 1 - stage
        start = [0.0, 0.0, 0.0, 0.0]
        start[FORWARD_0] = stage * forward[0]
        start[FORWARD_1] = forward_0_end + after * forward[1]
        start[GRADIENT_1] = forward_1_end + stage * backward[1]
        start[GRADIENT_0] = gradient_1_end + after * backward[0]
        priorities.append([[start[stream] + m * period for m in range(micro_batches)] for stream in STREAMS])
    return ListPriorities(priorities, block.patience, block.finish_first)


def _sequential(stages: int, micro_batches: int) -> Schedule:
    """Return the schedule with one micro-batch at a time, which is possible with any limit."""
    kinds: tuple[tuple[Kind, int], ...] = (("F", 0), ("F", 1), ("I", 1), ("W", 1), ("I", 0), ("W", 0))
    actions = tuple(Action(kind, index, chunk) for index in range(micro_batches) for kind, chunk in kinds)
    return Schedule((actions,) * stages, placement="v")


def _zb_v(stages: int, micro_batches: int) -> Schedule:
    """Return ZB-V as in the paper, without a bubble if all passes take equally long (arXiv 2401.10241).

    With fewer than 2 p micro-batches it is the order for 2 p, without the actions of the missing ones.
    """
    full = max(micro_batches, 2 * stages)
    orders = []
    for stage in range(stages):
        remaining = stages - stage
        work: list[str] = ["F0"] * (2 * remaining - 1) + ["F1", "F0"] * stage + ["F1", "I1", "W1"] * remaining
        started = work.count("F0")
        for number in range(full - stages):
            work += ["F0"] * (started + number < full) + ["I0", "W0", "F1", "I1", "W1"]
        work += ["I0", "I1"] * stage + ["I0", "W0"] * remaining + ["W1"] * stage + ["W0"] * stage
        orders.append(number_actions(work, micro_batches))
    return Schedule(tuple(orders), placement="v")
