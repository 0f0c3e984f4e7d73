"""V-shaped schedules: ZB-V (Qi and others, arXiv 2401.10241), V-Half and V-Min (the same, arXiv 2405.15362).

Each stage holds two parts of the model, so that a micro-batch goes down the stages and comes up again: the
first stage has its loss, and all stages hold about the same activations. The papers give orders for times
that are all alike, and search for others. So does this, for all three and any times, within a limit of
activations, which is all in which they differ.

A schedule grows from one building block, the way of one micro-batch, repeated once in the time of its work.
The slower it travels down and up, the longer activations live, the fewer they may be. The search draws
building blocks, always the same ones, lets `list_scheduling` make schedules of them and keeps the quickest.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

from hpctrain.errors import HpctrainError
from hpctrain.pipeline.action import Action, Kind, Schedule
from hpctrain.pipeline.list_scheduling import (
    FORWARD_0,
    FORWARD_1,
    GRADIENT_0,
    GRADIENT_1,
    STREAMS,
    ListPriorities,
    PartTimes,
    arrange,
)
from hpctrain.pipeline.simulate import StageTimes, peak_activations, simulate, spread
from hpctrain.pipeline.v_bound import least_cost

_MOST_CANDIDATES = 320
_WORK = 320_000  # actions to lay out, over all candidates: about a second
_FINALISTS = 4
_ROUNDING = 1e-9
_GAIN = 0.01
"""Of a known order's time: where no order can spare more than that, none is looked for."""


LIMITS: Mapping[str, Callable[[int], int]] = {
    # No bubble where times are alike and micro-batches 2 p or more; as many as 1F1B's first stage.
    "zb-v": lambda stages: stages,
    # About half of 1F1B's bubble.
    "v-half": lambda stages: (stages + 2) // 2,
    # About two thirds of 1F1B's bubble.
    "v-min": lambda stages: (stages + 4) // 3,
}
"""Micro-batches whose activations each of so many stages may hold, by the schedule's name."""


@dataclass(frozen=True)
class _Block:
    """One building block, in parts of what is possible, and how to act where it meets itself (see
    `ListPriorities`)."""

    room: tuple[float, float] = (1.0, 1.0)
    """How much of the time that the limit allows is spent on the way, for chunk 0 and chunk 1."""
    forward_share: tuple[float, float] = (0.5, 0.5)
    """How much of the slack on the way is spent in forward, the rest in backward."""
    turns: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Rest at the last stage, at the first one, and at the last one again, in periods."""
    stretch: float = 1.0  # time from one micro-batch to the next over the time of its work
    patience: float = 0.5
    hasty: bool = False


def search(
    name: str, stages: int, micro_batches: int, times: StageTimes, memory_limit: float | None
) -> Schedule:
    """The quickest schedule found within a limit of activations, by default that of LIMITS.

    Raises HpctrainError for a limit that a single micro-batch would exceed.
    """
    memory_limit = LIMITS[name](stages) if memory_limit is None else memory_limit
    limit = math.floor(2 * memory_limit + _ROUNDING)  # a chunk's activations are half of a stage's
    if limit < 2:
        raise HpctrainError(
            f"{name}: the limit of activations of {memory_limit:g} micro-batches must be 1 or more"
        )
    shape = Schedule(((Action("F", 0, 0), Action("F", 0, 1)),) * stages, name, "v")
    part_times = PartTimes(*map(tuple, spread(times, shape)))
    least = least_cost(part_times, micro_batches, limit)
    best = _by_hand(stages, micro_batches)
    if 2 * max(peak_activations(best)) > limit:
        best = _one_by_one(stages, micro_batches)
    cost = simulate(best, times).cost
    if cost > least * (1 + _GAIN):
        # What is good for a few micro-batches more than fill the pipeline is good for many.
        for block in _explore(part_times, min(micro_batches, 2 * stages + 4), limit):
            plan = _plan(block, part_times, micro_batches, limit)
            result = arrange(plan, part_times, micro_batches, limit, cost * (1 - _ROUNDING))
            if result is not None:
                cost, best = result
    return replace(best, name=name)


@lru_cache(maxsize=64)
def _explore(times: PartTimes, trial: int, limit: int) -> list[_Block]:
    """The best building blocks for `trial` micro-batches, best first: half of the candidates at random, half
    near the best so far.
    """
    least = least_cost(times, trial, limit)
    candidates = max(4, min(_MOST_CANDIDATES, _WORK // (6 * times.stages * trial)))
    generator = random.Random(0)
    best: list[tuple[float, int, _Block]] = []

    def attempt(number: int, block: _Block) -> None:
        bound = best[-1][0] if len(best) == _FINALISTS else math.inf
        result = arrange(_plan(block, times, trial, limit), times, trial, limit, bound)
        if result is not None:
            best.append((result[0], number, block))
            best.sort(key=lambda entry: entry[:2])
            del best[_FINALISTS:]

    for number, block in enumerate(_draw(generator, candidates // 2)):
        attempt(number, block)
    for number in range(candidates - candidates // 2):
        if not best or best[0][0] <= least * (1 + _ROUNDING):
            break
        parent = best[min(number % 6 // 2, len(best) - 1)][2]
        attempt(candidates + number, _near(generator, parent))
    return [block for _, _, block in best]


def _draw(generator: random.Random, count: int) -> Iterator[_Block]:
    yield from [_Block(), _Block(room=(0.0, 0.0)), _Block(forward_share=(0.0, 1.0))][:count]
    for _ in range(count - 3):
        draws = [generator.random() for _ in range(12)]
        tight = draws[0] < 0.3
        yield _Block(
            room=(0.0, 0.0) if tight else (0.6 + 0.6 * draws[1], 0.6 + 0.6 * draws[2]),
            forward_share=(draws[3], draws[4]),
            turns=(max(0.0, 3 * draws[5] - 2), max(0.0, 2 * draws[6] - 1), max(0.0, 3 * draws[7] - 2)),
            stretch=1.0 if draws[8] < 0.6 else 0.9 + 0.4 * draws[9],
            patience=draws[10],
            hasty=draws[11] < 0.5,
        )


def _near(generator: random.Random, block: _Block) -> _Block:
    def moved(value: float, width: float) -> float:
        draw = generator.random()
        return value if draw < 0.4 else max(0.0, value + width * (generator.random() - 0.5))

    return replace(
        block,
        room=(moved(block.room[0], 0.3), moved(block.room[1], 0.3)),
        forward_share=(
            min(1.0, moved(block.forward_share[0], 0.5)),
            min(1.0, moved(block.forward_share[1], 0.5)),
        ),
        turns=(moved(block.turns[0], 0.2), moved(block.turns[1], 0.3), moved(block.turns[2], 0.2)),
        patience=min(1.0, moved(block.patience, 0.3)),
    )


def _plan(block: _Block, times: PartTimes, micro_batches: int, limit: int) -> ListPriorities:
    """When everything would happen if the building block were repeated with nothing in its way."""
    stages = times.stages
    mean_communication = math.fsum(times.communication) / max(1, 2 * stages - 2)
    fastest_forward = math.fsum(times.forward) / (2 * stages) + mean_communication
    fastest_backward = math.fsum(times.input_gradient) / (2 * stages) + mean_communication
    fastest = fastest_forward + fastest_backward
    work = max(math.fsum(times.of_stage(stage)) for stage in range(stages))
    period = max(work, 2 * stages * fastest / limit) * block.stretch
    # On every stage, the activations of a micro-batch live for 2 p x (time of a step forward and one back).
    longest = limit * work / (2 * stages)
    slack = [max(0.0, longest * room - fastest) for room in block.room]
    forward = [fastest_forward + s * share for s, share in zip(slack, block.forward_share, strict=True)]
    backward = [
        fastest_backward + s * (1 - share) for s, share in zip(slack, block.forward_share, strict=True)
    ]
    rise = stages * forward[0] + block.turns[0] * work
    turn = rise + stages * forward[1] + block.turns[1] * work
    back = turn + stages * backward[1] + block.turns[2] * work
    ranks = []
    for stage in range(stages):
        after = stages - 1 - stage
        start = [0.0, 0.0, 0.0, 0.0]
        start[FORWARD_0] = stage * forward[0]
        start[FORWARD_1] = rise + after * forward[1]
        start[GRADIENT_1] = turn + stage * backward[1]
        start[GRADIENT_0] = back + after * backward[0]
        ranks.append([[start[stream] + m * period for m in range(micro_batches)] for stream in STREAMS])
    return ListPriorities(ranks, block.patience, block.hasty)


def _one_by_one(stages: int, micro_batches: int) -> Schedule:
    """One micro-batch at a time: possible with any limit."""
    kinds: tuple[tuple[Kind, int], ...] = (("F", 0), ("F", 1), ("I", 1), ("W", 1), ("I", 0), ("W", 0))
    actions = tuple(Action(kind, index, chunk) for index in range(micro_batches) for kind, chunk in kinds)
    return Schedule((actions,) * stages, placement="v")


def _by_hand(stages: int, micro_batches: int) -> Schedule:
    """ZB-V as the paper draws it, without a bubble where times are all alike (arXiv 2401.10241).

    With fewer than 2 p micro-batches it is the order of 2 p without those that there are not.
    """
    full = max(micro_batches, 2 * stages)
    orders = []
    for stage in range(stages):
        to_come = stages - stage
        work: list[str] = ["F0"] * (2 * to_come - 1) + ["F1", "F0"] * stage + ["F1", "I1", "W1"] * to_come
        let_in = work.count("F0")
        for number in range(full - stages):
            work += ["F0"] * (let_in + number < full) + ["I0", "W0", "F1", "I1", "W1"]
        work += ["I0", "I1"] * stage + ["I0", "W0"] * to_come + ["W1"] * stage + ["W0"] * stage
        orders.append(_numbered(work, micro_batches))
    return Schedule(tuple(orders), placement="v")


def _numbered(work: list[str], micro_batches: int) -> tuple[Action, ...]:
    """Kinds and chunks with the micro-batches one after the other, without those that there are not."""
    counts: Counter[str] = Counter()
    actions = []
    for piece in work:
        if counts[piece] < micro_batches:
            actions.append(Action(cast(Kind, piece[0]), counts[piece], int(piece[1])))
        counts[piece] += 1
    return tuple(actions)
