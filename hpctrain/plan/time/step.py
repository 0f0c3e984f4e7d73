"""Seconds of a step by cause: passes over layers, on their schedule, and what follows the last backward.

The schedule is simulated, not told by a formula. Beside the causes of layers there are `messages` between
stages and the `bubble` in which the stage that has most to do waits; sums of `gradients` and `parameters`
that are gathered, as far as they do not hide behind backward; the `optimizer`; and what is `fixed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.deck.schema import Deck
from hpctrain.engine.place import placed_by_flops
from hpctrain.errors import HpctrainError
from hpctrain.model.count import count
from hpctrain.model.shape import ModelShape
from hpctrain.pipeline.action import Schedule
from hpctrain.pipeline.simulate import Times, simulate
from hpctrain.plan.time.arrangement import Arrangement
from hpctrain.plan.time.layers import LayerSeconds, LayerSizes, added, layer_seconds, layer_sizes, times
from hpctrain.plan.time.machine import Machine, collective_seconds, gather_seconds, message_seconds

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
    "optimizer",
    "fixed",
)


TIMED: Mapping[str, object] = {
    "communication.compress": "none",
    "communication.local_steps": 1,
    "memory.optimizer": "device",
    "memory.parameters": "device",
    "memory.activations": "keep",
    "memory.activation_format": "exact",
    "memory.accumulate": "whole",
    "optimizer.name": "adamw",
}
"""Keys whose other values take time, or spare some, that is not told."""


@dataclass(frozen=True)
class StepPlan:
    """A step's seconds by cause, of the stage that has most to do; its tokens; FLOPs of all ranks as
    published formulas count them, without and with what is computed again; what of the deck is not told.
    """

    seconds_by_cause: Mapping[str, float]
    ranks: int
    tokens: int
    flops: float
    hardware_flops: float
    untold: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(self.seconds_by_cause.values())

    def row(self) -> dict[str, object]:
        """As written into JSON."""
        return {
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "tflops_per_rank": self.flops_per_rank / 1e12,
            "seconds_by_cause": dict(self.seconds_by_cause),
            "untold": list(self.untold),
        }

    @property
    def flops_per_rank(self) -> float:
        """FLOP/s of a rank, what is computed again counted."""
        return self.hardware_flops / self.seconds / self.ranks


def plan_step(deck: Deck, ranks: int, vocabulary: int, machine: Machine) -> StepPlan:
    """A step of a deck on so many ranks of a machine. HpctrainError as a run would."""
    if deck.communication.server != "none":
        sentence = "how long a step with servers takes is not planned: leave --machine out"
        raise HpctrainError(deck.problem("communication.server", sentence))
    shape = ModelShape.of(deck, vocabulary)
    at = Arrangement.of(deck, ranks, deck.machine.ranks_per_node or machine.ranks_per_node)
    placement = placed_by_flops(deck, shape, at.data)
    schedule = placement.schedule_of(at.micro_batches)
    layers = layer_sizes(shape, tuple(deck.model.frozen))
    causes = step_seconds(layers, at, schedule, placement.split, machine)
    counted, tokens = count(shape), deck.batch.global_size * deck.batch.sequence
    again = counted.recomputed_flops_per_token(deck.memory.recompute)
    flops = counted.flops_per_token * tokens
    untold = tuple(f"{key} = {deck.value(key)}" for key, value in TIMED.items() if deck.value(key) != value)
    return StepPlan(causes, ranks, tokens, flops, flops + again * tokens, untold)


def step_seconds(
    layers: Sequence[LayerSizes], at: Arrangement, schedule: Schedule, split: Sequence[int], machine: Machine
) -> dict[str, float]:
    """Seconds by cause of a step of these layers, blocks split so over the parts of a schedule."""
    of_layers = {layer: layer_seconds(layer, at, machine) for layer in dict.fromkeys(layers)}
    parts = _parts(layers, split)
    passes = [_part_seconds(part, of_layers) for part in parts]
    message = _message(layers[0].hidden, at, machine) if schedule.stage_count > 1 else 0.0
    blocking = machine.messages == "blocking"
    waits = [message * blocking * _ends(schedule, part) for part in range(schedule.parts)]
    simulation = simulate(
        schedule,
        Times(
            [sum(each.forward.values()) + wait for each, wait in zip(passes, waits, strict=True)],
            [sum(each.input_gradient.values()) + wait for each, wait in zip(passes, waits, strict=True)],
            [sum(each.weight_gradient.values()) for each in passes],
            0.0 if blocking else message,
        ),
    )
    busiest = min(range(schedule.stage_count), key=lambda stage: simulation.idle[stage])
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
        _rest([layer for part in held for layer in parts[part]], passes[held[0]], at, machine),
    )
    return {cause: causes.get(cause, 0.0) for cause in CAUSES}


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


def _ends(schedule: Schedule, part: int) -> float:
    """Half the messages that a part waits for in one direction: one comes, one goes, both sides at once."""
    stage = schedule.home(part)[0]
    others = [
        number
        for number in (part - 1, part + 1)
        if 0 <= number < schedule.parts and schedule.home(number)[0] != stage
    ]
    return len(others) / 2


def _message(hidden: int, at: Arrangement, machine: Machine) -> float:
    """Seconds of hidden states from a stage to the next."""
    size = at.rows * hidden * at.itemsize
    if machine.split_messages and not at.sequence_parallel and at.tensor > 1 and at.message_crosses:
        gathered = collective_seconds(machine, "all_gather", size, at.tensor_ranks)
        return message_seconds(machine, size / at.tensor, at.message_crosses) + gathered
    return message_seconds(machine, size, at.message_crosses)


def _rest(
    held: Sequence[LayerSizes], passes: LayerSeconds, at: Arrangement, machine: Machine
) -> dict[str, float]:
    """What follows the last micro-batch's backward on a stage that holds these layers."""
    of_experts, of_others = (
        sum(sizes) for sizes in zip(*(layer.elements(at) for layer in held), strict=True)
    )
    causes = {"gradients": 0.0, "parameters": 0.0, "optimizer": 0.0, "fixed": machine.fixed}
    hiding = machine.overlap * (sum(passes.input_gradient.values()) + sum(passes.weight_gradient.values()))
    gathers = 2 * at.micro_batches if at.zero == 3 else 1
    for elements, group in ((of_experts, at.expert_data_ranks), (of_others, at.data_ranks)):
        cut = group.size if at.zero else 1
        if not elements:
            continue
        causes["optimizer"] += _update(elements / cut, at, machine)
        if at.zero:
            causes["gradients"] += collective_seconds(
                machine, "reduce_scatter", elements * at.gradient_itemsize, group
            )
            once = gather_seconds(machine, elements * at.itemsize, group)
            causes["parameters"] += gathers * once
        else:
            causes["gradients"] += collective_seconds(
                machine, "all_reduce", elements * at.gradient_itemsize, group
            )
    hidden = min(hiding, machine.overlap * causes["gradients"])
    causes["gradients"] -= hidden
    if at.zero == 3:
        causes["parameters"] *= 1 - machine.overlap
    return causes


def _update(elements: float, at: Arrangement, machine: Machine) -> float:
    """Seconds of the optimizer: gradient, master and two moments are read, all but the first written."""
    rate = machine.optimizer_of(at.form)
    if rate is not None:
        return elements / rate
    moved = 4 * (4 + 3) + (at.itemsize if at.itemsize < 4 else 0)
    return elements * moved / machine.memory_bandwidth
