"""Seconds of a step by cause: passes over layers in the order of the schedule, and what follows them.

The schedule is simulated. In addition to the causes of layers, there are `messages` between stages, the
`bubble` in which the stage with most work waits, reductions of `gradients` and gathering of `parameters` that
the backward pass does not hide, transfers of `offload`, the `optimizer`, and a `fixed` time.
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
from hpctrain.plan.time.layer_seconds import LayerSeconds, LayerSizes, layer_sizes, scale_causes, sum_by_cause
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


PREDICTED_VALUES: Mapping[str, object] = {
    "communication.compress": "none",
    "communication.emulate": None,
    "layout.local_steps.replicas": 1,
    "layout.local_steps.steps": 1,
    "memory.activation_format": "exact",
    "optimizer.muon.matrices": ("blocks.*",),
    "precision.fp8_gather": False,
    "precision.fp8_messages": False,
}
"""Values of keys for which step times are predicted. The effect of other values is not included."""


@dataclass(frozen=True)
class StepPlan:
    """Predicted step.

    Attributes:
        seconds_by_cause: Seconds by cause on the stage with most work.
        ranks: Number of ranks.
        tokens: Tokens of a step.
        flops: FLOPs of all ranks by published formulas, without recomputation.
        hardware_flops: FLOPs of all ranks with recomputation.
        peak: FLOP/s of a rank at the peak, as the mean over kinds of node.
        steps: Number of steps of the run.
        ignored_keys: Keys of the deck whose effect is not included.
        stage: Number of the stage with most work.
    """

    seconds_by_cause: Mapping[str, float]
    ranks: int
    tokens: int
    flops: float
    hardware_flops: float
    peak: float
    steps: int
    ignored_keys: tuple[str, ...] = ()
    stage: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
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
            "untold": list(self.ignored_keys),
        }

    @property
    def flops_per_rank(self) -> float:
        """FLOP/s of a rank, with recomputation."""
        return self.hardware_flops / self.seconds / self.ranks

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: share of the peak, without recomputation (arXiv 2204.02311)."""
        return self.flops / self.seconds / self.ranks / self.peak

    @property
    def run_seconds(self) -> float:
        """Seconds of all steps."""
        return self.steps * self.seconds

    @property
    def rank_hours(self) -> float:
        """Hours of all steps, summed over ranks."""
        return self.run_seconds * self.ranks / 3600


def plan_step(deck: Deck, ranks: int, vocabulary: int, machine: MachineRates) -> StepPlan:
    """Return the predicted step of a deck on a machine.

    Raises:
        HpctrainError: A run would fail with this error, or the deck has parameter servers.
    """
    if deck.communication.server is not None:
        sentence = "step times of parameter servers are not predicted (leave --machine out)"
        raise HpctrainError(deck.problem("communication.server.mode", sentence))
    shape = ModelShape.of(deck, vocabulary)
    at = LayoutSizes.of(deck, ranks, deck.machine.ranks_per_node or machine.ranks_per_node)
    placement = place_by_flops(deck, shape, at.data)
    schedule = placement.schedule_of(at.micro_batches)
    layers = layer_sizes(shape, tuple(deck.model.frozen))
    stage, causes = busiest_seconds(layers, at, schedule, placement.split, machine)
    flop_counts, tokens = model_flops(shape), deck.batch.global_size * deck.batch.sequence
    recomputed = flop_counts.recomputed_flops_per_token(deck.memory.recompute)
    flops = flop_counts.flops_per_token * tokens
    values = {key: deck.value(key) for key in PREDICTED_VALUES}
    ignored_keys = tuple(
        f"{key} = {value}" for key, value in values.items() if value not in {None, PREDICTED_VALUES[key]}
    )
    of_kinds = ranks_of_kinds(machine, ranks, at.ranks_per_node)
    peaks = sum(each.products_of(at.form).peak * share for each, share in of_kinds)
    peak, steps = peaks / ranks, deck.run.steps
    return StepPlan(
        causes, ranks, tokens, flops, flops + recomputed * tokens, peak, steps, ignored_keys, stage
    )


Simulate = Callable[[Schedule, StageTimes], Simulation]


def step_seconds(
    layers: Sequence[LayerSizes],
    at: LayoutSizes,
    schedule: Schedule,
    split: Sequence[int],
    machine: MachineRates,
    simulate: Simulate = simulate,
) -> dict[str, float]:
    """Return the seconds of a step by cause. The arguments are those of `busiest_seconds`."""
    return busiest_seconds(layers, at, schedule, split, machine, simulate)[1]


def busiest_seconds(
    layers: Sequence[LayerSizes],
    at: LayoutSizes,
    schedule: Schedule,
    split: Sequence[int],
    machine: MachineRates,
    simulate: Simulate = simulate,
) -> tuple[int, dict[str, float]]:
    """Return the number of the stage with most work, and its seconds by cause.

    With several kinds of node, it is the stage that takes longest after its last backward pass, since the
    step ends with it.

    Args:
        layers: Layers of the model.
        at: Sizes of the layout.
        schedule: Schedule of the step.
        split: Number of blocks of each part.
        machine: Rates of the machine.
        simulate: Function that simulates a schedule.
    """
    nodes = StageNodes(machine, at)
    group_seconds = [nodes.seconds_by_layer(layers, group) for group in range(len(nodes.groups))]
    parts = _parts(layers, split)
    stage_of_part = [schedule.stage_and_chunk(part)[0] for part in range(schedule.parts)]
    passes = [
        _part_seconds(part, group_seconds[nodes.of_stage[home]])
        for part, home in zip(parts, stage_of_part, strict=True)
    ]
    messages = messages_of(schedule, layers[0].hidden, nodes)
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
        stage_parts = [schedule.part(stage, chunk) for chunk in range(schedule.chunks)]
        first = passes[stage_parts[0]]
        backward = sum(first.input_gradient.values()) + sum(first.weight_gradient.values())
        return nodes.seconds_after_backward(
            [layer for part in stage_parts for layer in parts[part]], backward, at, stage
        )

    def order(stage: int) -> tuple[float, float]:
        return -sum(after(stage).values()) if not nodes.has_one_kind else 0.0, simulation.idle[stage]

    busiest = min(range(schedule.stage_count), key=order)
    stage_parts = [schedule.part(busiest, chunk) for chunk in range(schedule.chunks)]
    count = schedule.micro_batches
    causes = sum_by_cause(
        *(
            scale_causes(
                sum_by_cause(passes[part].forward, passes[part].input_gradient, passes[part].weight_gradient),
                count,
            )
            for part in stage_parts
        ),
        {
            "messages": sum(2 * waits[part] * count for part in stage_parts),
            "bubble": simulation.idle[busiest],
        },
        after(busiest),
    )
    return busiest, {cause: causes.get(cause, 0.0) for cause in CAUSES}


def _parts(layers: Sequence[LayerSizes], split: Sequence[int]) -> list[list[LayerSizes]]:
    """Return the layers of each part. The first one has the embedding, the last one the output layer."""
    first, *blocks, last = layers
    parts, begin = list[list[LayerSizes]](), 0
    for size in split:
        parts.append(list(blocks[begin : begin + size]))
        begin += size
    parts[0].insert(0, first)
    parts[-1].append(last)
    return parts


def _part_seconds(part: Sequence[LayerSizes], of_layers: Mapping[LayerSizes, LayerSeconds]) -> LayerSeconds:
    layer_counts: dict[LayerSizes, int] = {}
    for layer in part:
        layer_counts[layer] = layer_counts.get(layer, 0) + 1
    seconds = [(of_layers[layer], count) for layer, count in layer_counts.items()]
    return LayerSeconds(
        sum_by_cause(*(scale_causes(each.forward, count) for each, count in seconds)),
        sum_by_cause(*(scale_causes(each.input_gradient, count) for each, count in seconds)),
        sum_by_cause(*(scale_causes(each.weight_gradient, count) for each, count in seconds)),
    )


def split_by_seconds(layers: Sequence[LayerSizes], nodes: StageNodes, schedule: Schedule) -> tuple[int, ...]:
    """Return the number of blocks of each part with which the longest stage is shortest."""
    times = []
    for group in range(len(nodes.groups)):
        of_layers = {layer: each.total for layer, each in nodes.seconds_by_layer(layers, group).items()}
        times.append([of_layers[layer] for layer in layers])
    return tuple(split_by_stage_times([times[group] for group in nodes.of_stage], schedule))


def messages_of(schedule: Schedule, hidden: int, nodes: StageNodes) -> list[float]:
    """Return the seconds of the message from each part to the next; 0 if both are on the same stage."""
    seconds_of_pair = dict[tuple[int, int], float]()
    stage_of_part = [schedule.stage_and_chunk(part)[0] for part in range(schedule.parts)]
    for pair in dict.fromkeys(pairwise(stage_of_part)):
        one, other = pair
        crosses = nodes.at.crosses(one, other)
        seconds = (boundary_seconds(hidden, nodes.at, kind, crosses) for kind in nodes.links(one, other))
        seconds_of_pair[pair] = max(seconds) if one != other else 0.0
    return [seconds_of_pair[pair] for pair in pairwise(stage_of_part)]


def waits_of(messages: Sequence[float]) -> list[float]:
    """Return the seconds for which each part waits for messages in one direction, half of each message."""
    before, after = [0.0, *messages], [*messages, 0.0]
    return [(one + other) / 2 for one, other in zip(before, after, strict=True)]


def boundary_seconds(hidden: int, at: LayoutSizes, machine: MachineRates, crosses: bool) -> float:
    """Return the seconds of the hidden states from a stage to the next, on another node if `crosses`."""
    size = at.rows * hidden * at.itemsize
    if machine.split_messages and not at.sequence_parallel and at.tensor > 1 and crosses:
        gathered = collective_seconds(machine, "all_gather", size, at.tensor_ranks)
        return message_seconds(machine, size / at.tensor, crosses) + gathered
    return message_seconds(machine, size, crosses)
