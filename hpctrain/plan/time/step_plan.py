"""Seconds of a step by cause: passes over layers, on their schedule, and what follows the last backward.

The schedule is simulated, not told by a formula. Beside the causes of layers there are `messages` between
stages and the `bubble` in which the stage that has most to do waits; sums of `gradients` and `parameters`
that are gathered, as far as they do not hide behind backward; what lies elsewhere and is waited for
(`offload`); the `optimizer`; and what is `fixed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hpctrain.costs.balanced_split import split_by_stage_times
from hpctrain.costs.layer_flops import model_flops
from hpctrain.deck.schema import Deck
from hpctrain.engine.layout.layer_placement import place_by_flops
from hpctrain.errors import HpctrainError
from hpctrain.model.shape import ModelShape
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.simulate import Simulation, StageTimes, simulate
from hpctrain.plan.time.layer_seconds import LayerSeconds, LayerSizes, added, layer_sizes, times
from hpctrain.plan.time.layout_sizes import LayoutSizes
from hpctrain.plan.time.machine_rates import MachineRates, collective_seconds, message_seconds
from hpctrain.plan.time.stage_nodes import StageNodes, ranks_of_kinds

CAUSES = (
    "products",
    "attention",
    "elementwise",
    "recompute",
    "tensor",
    "context",
    "expert",
    "messages",
    "bubble",
    "gradients",
    "parameters",
    "offload",
    "optimizer",
    "fixed",
)


TIMED: Mapping[str, object] = {
    "communication.compress": "none",
    "communication.emulate": None,
    "layout.local_steps.replicas": 1,
    "layout.local_steps.steps": 1,
    "memory.activation_format": "exact",
    "optimizer.muon.matrices": ("blocks.*",),
    "precision.fp8_gather": False,
    "precision.fp8_messages": False,
}
"""Keys whose other values take time, or spare some, that is not told."""


@dataclass(frozen=True)
class StepPlan:
    """A step's seconds by cause, of the `stage` that has most to do; its tokens; FLOPs of all ranks as
    published formulas count them, without and with what is computed again; FLOP/s of a rank at the peak, of
    several kinds of node in the mean; the run's steps; what of the deck is not told.
    """

    seconds_by_cause: Mapping[str, float]
    ranks: int
    tokens: int
    flops: float
    hardware_flops: float
    peak: float
    steps: int
    untold: tuple[str, ...] = ()
    stage: int = 0

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(self.seconds_by_cause.values())

    def row(self) -> dict[str, object]:
        """Return the contents as a value that can be written as JSON."""
        return {
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "tflops_per_rank": self.flops_per_rank / 1e12,
            "mfu": self.mfu,
            "run_seconds": self.run_seconds,
            "rank_hours": self.rank_hours,
            "seconds_by_cause": dict(self.seconds_by_cause),
            "untold": list(self.untold),
        }

    @property
    def flops_per_rank(self) -> float:
        """FLOP/s of a rank, what is computed again counted."""
        return self.hardware_flops / self.seconds / self.ranks

    @property
    def mfu(self) -> float:
        """Share of the peak in which a rank computes what is not computed again (arXiv 2204.02311)."""
        return self.flops / self.seconds / self.ranks / self.peak

    @property
    def run_seconds(self) -> float:
        """Of all steps."""
        return self.steps * self.seconds

    @property
    def rank_hours(self) -> float:
        """Hours of all ranks in these."""
        return self.run_seconds * self.ranks / 3600


def plan_step(deck: Deck, ranks: int, vocabulary: int, machine: MachineRates) -> StepPlan:
    """A step of a deck on so many ranks of a machine. HpctrainError as a run would."""
    if deck.communication.server is not None:
        sentence = "step times of parameter servers are not predicted (leave --machine out)"
        raise HpctrainError(deck.problem("communication.server.mode", sentence))
    shape = ModelShape.of(deck, vocabulary)
    at = LayoutSizes.of(deck, ranks, deck.machine.ranks_per_node or machine.ranks_per_node)
    placement = place_by_flops(deck, shape, at.data)
    schedule = placement.schedule_of(at.micro_batches)
    layers = layer_sizes(shape, tuple(deck.model.frozen))
    stage, causes = busiest_seconds(layers, at, schedule, placement.split, machine)
    counted, tokens = model_flops(shape), deck.batch.global_size * deck.batch.sequence
    again = counted.recomputed_flops_per_token(deck.memory.recompute)
    flops = counted.flops_per_token * tokens
    values = {key: deck.value(key) for key in TIMED}
    untold = tuple(f"{key} = {value}" for key, value in values.items() if value not in {None, TIMED[key]})
    of_kinds = ranks_of_kinds(machine, ranks, at.ranks_per_node)
    peaks = sum(each.products_of(at.form).peak * share for each, share in of_kinds)
    peak, steps = peaks / ranks, deck.run.steps
    return StepPlan(causes, ranks, tokens, flops, flops + again * tokens, peak, steps, untold, stage)


Simulate = Callable[[Schedule, StageTimes], Simulation]


def step_seconds(
    layers: Sequence[LayerSizes],
    at: LayoutSizes,
    schedule: Schedule,
    split: Sequence[int],
    machine: MachineRates,
    simulate: Simulate = simulate,
) -> dict[str, float]:
    """Seconds by cause of a step of these layers, blocks split so over the parts of a schedule."""
    return busiest_seconds(layers, at, schedule, split, machine, simulate)[1]


def busiest_seconds(
    layers: Sequence[LayerSizes],
    at: LayoutSizes,
    schedule: Schedule,
    split: Sequence[int],
    machine: MachineRates,
    simulate: Simulate = simulate,
) -> tuple[int, dict[str, float]]:
    """The stage that has most to do, and its seconds by cause: see `step_seconds`.

    On several kinds of node it is the one that takes longest after its last backward: none waits for another
    there, and the step is over when the last of them is.
    """
    ground = StageNodes(machine, at)
    of_groups = [ground.layers(layers, group) for group in range(len(ground.groups))]
    parts = _parts(layers, split)
    homes = [schedule.stage_and_chunk(part)[0] for part in range(schedule.parts)]
    passes = [
        _part_seconds(part, of_groups[ground.of_stage[home]]) for part, home in zip(parts, homes, strict=True)
    ]
    messages = messages_of(schedule, layers[0].hidden, ground)
    blocking = machine.messages == "blocking"
    waits = [blocking * wait for wait in waits_of(messages)]
    simulation = simulate(
        schedule,
        StageTimes(
            [sum(each.forward.values()) + wait for each, wait in zip(passes, waits, strict=True)],
            [sum(each.input_gradient.values()) + wait for each, wait in zip(passes, waits, strict=True)],
            [sum(each.weight_gradient.values()) for each in passes],
            0.0 if blocking else messages,
        ),
    )

    def after(stage: int) -> dict[str, float]:
        held = [schedule.part(stage, chunk) for chunk in range(schedule.chunks)]
        first = passes[held[0]]
        backward = sum(first.input_gradient.values()) + sum(first.weight_gradient.values())
        return ground.after([layer for part in held for layer in parts[part]], backward, at, stage)

    def order(stage: int) -> tuple[float, float]:
        return -sum(after(stage).values()) if not ground.is_one else 0.0, simulation.idle[stage]

    busiest = min(range(schedule.stage_count), key=order)
    held = [schedule.part(busiest, chunk) for chunk in range(schedule.chunks)]
    count = schedule.micro_batches
    causes = added(
        *(
            times(
                added(passes[part].forward, passes[part].input_gradient, passes[part].weight_gradient), count
            )
            for part in held
        ),
        {"messages": sum(2 * waits[part] * count for part in held), "bubble": simulation.idle[busiest]},
        after(busiest),
    )
    return busiest, {cause: causes.get(cause, 0.0) for cause in CAUSES}


def _parts(layers: Sequence[LayerSizes], split: Sequence[int]) -> list[list[LayerSizes]]:
    """The layers of each part: the first one embeds too, the last one predicts."""
    first, *blocks, last = layers
    parts, begin = list[list[LayerSizes]](), 0
    for size in split:
        parts.append(list(blocks[begin : begin + size]))
        begin += size
    parts[0].insert(0, first)
    parts[-1].append(last)
    return parts


def _part_seconds(part: Sequence[LayerSizes], of_layers: Mapping[LayerSizes, LayerSeconds]) -> LayerSeconds:
    alike: dict[LayerSizes, int] = {}
    for layer in part:
        alike[layer] = alike.get(layer, 0) + 1
    seconds = [(of_layers[layer], count) for layer, count in alike.items()]
    return LayerSeconds(
        added(*(times(each.forward, count) for each, count in seconds)),
        added(*(times(each.input_gradient, count) for each, count in seconds)),
        added(*(times(each.weight_gradient, count) for each, count in seconds)),
    )


def split_by_seconds(layers: Sequence[LayerSizes], ground: StageNodes, schedule: Schedule) -> tuple[int, ...]:
    """Blocks of every part of a schedule so that its longest stage is as short as can be, each on the nodes
    that it lies on.
    """
    times = []
    for group in range(len(ground.groups)):
        of_layers = {layer: each.total for layer, each in ground.layers(layers, group).items()}
        times.append([of_layers[layer] for layer in layers])
    return tuple(split_by_stage_times([times[group] for group in ground.of_stage], schedule))


def messages_of(schedule: Schedule, hidden: int, ground: StageNodes) -> list[float]:
    """Seconds of hidden states from each part to the next, none where both are on one stage."""
    found = dict[tuple[int, int], float]()
    homes = [schedule.stage_and_chunk(part)[0] for part in range(schedule.parts)]
    for pair in dict.fromkeys(pairwise(homes)):
        one, other = pair
        crosses = ground.at.crosses(one, other)
        seconds = (boundary_seconds(hidden, ground.at, kind, crosses) for kind in ground.links(one, other))
        found[pair] = max(seconds) if one != other else 0.0
    return [found[pair] for pair in pairwise(homes)]


def waits_of(messages: Sequence[float]) -> list[float]:
    """Seconds that each part waits for messages in one direction: for half of each, both sides at once."""
    before, after = [0.0, *messages], [*messages, 0.0]
    return [(one + other) / 2 for one, other in zip(before, after, strict=True)]


def boundary_seconds(hidden: int, at: LayoutSizes, machine: MachineRates, crosses: bool) -> float:
    """Seconds of hidden states from a stage to the next, on other nodes where it `crosses`."""
    size = at.rows * hidden * at.itemsize
    if machine.split_messages and not at.sequence_parallel and at.tensor > 1 and crosses:
        gathered = collective_seconds(machine, "all_gather", size, at.tensor_ranks)
        return message_seconds(machine, size / at.tensor, crosses) + gathered
    return message_seconds(machine, size, crosses)
