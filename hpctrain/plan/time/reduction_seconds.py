"""Seconds of sums of gradients and of gathered parameters, and of the update, on a rank of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpctrain.plan.time.layer_seconds import LayerSizes
from hpctrain.plan.time.layout_sizes import LayoutSizes
from hpctrain.plan.time.machine_rates import (
    MachineRates,
    Operation,
    Sharing,
    collective_seconds,
    gather_seconds,
    message_seconds,
)
from hpctrain.plan.time.update_seconds import update_seconds


def after_backward(
    held: Sequence[LayerSizes],
    backward: float,
    at: LayoutSizes,
    machine: MachineRates,
    ends: Sequence[MachineRates] = (),
) -> dict[str, float]:
    """By cause, what a stage that holds these layers waits for beside its passes, of which the backward of a
    micro-batch through the part that ends last takes `backward` seconds. `ends` are the kinds of node of the
    first and the last stage, where these are not all.
    """
    held, exchanged = _with_tied(held, at, ends or (machine,))
    causes = {"gradients": exchanged, "parameters": 0.0, "offload": 0.0, "fixed": machine.fixed}
    (expert_group, expert_replicas), (group, replicas) = at.expert_cut, at.data_cut
    elements = [sum(sizes) for sizes in zip(*(layer.updated(at) for layer in held), strict=True)]
    gathers = _gathers(held, at)
    for index, (cut, copies) in enumerate(((expert_group, expert_replicas), (group, replicas))):
        if not elements[index] and not gathers[index]:
            continue
        size = elements[index] * at.gradient_itemsize
        operation: Operation = "reduce_scatter" if at.zero else "all_reduce"
        buckets = _buckets(held, elements[index], at)
        causes["gradients"] += at.sums * waited_for(machine, operation, size, cut, buckets, backward)
        if not at.zero:
            continue
        # Between the copies of what ZeRO cuts within a group, once all of it is there.
        causes["gradients"] += collective_seconds(machine, "all_reduce", size / cut.size, copies)
        size = gathers[index] * at.itemsize
        hiding = 1 - machine.overlap if at.zero == 3 else 1.0
        causes["parameters"] += hiding * gather_seconds(machine, size, cut)
        causes["offload"] += _read(size / cut.size, at, machine)
    if at.tensor > 1 and (partial := sum(layer.partial(at) for layer in held)):
        size = partial * at.gradient_itemsize
        causes["tensor"] = collective_seconds(machine, "all_reduce", size, at.tensor_ranks)
    cuts = (expert_group.size, group.size) if at.zero else (1, 1)
    for cause, seconds in update_seconds(held, cuts, at, machine).items():
        causes[cause] = causes.get(cause, 0.0) + seconds
    return causes


def _with_tied(
    held: Sequence[LayerSizes], at: LayoutSizes, ends_on: Sequence[MachineRates]
) -> tuple[Sequence[LayerSizes], float]:
    """The layers with the table that the last one has of its own where the first one is on another stage, and
    seconds in which gradients of the two are exchanged.
    """
    ends = [layer for layer in held if layer.tied_elements]
    if at.pipeline == 1 or len(ends) != 1:
        return held, 0.0
    (end,) = ends
    size = end.tied_elements / at.tensor * at.gradient_itemsize
    crosses = at.crosses(0, at.pipeline - 1)
    seconds = max(message_seconds(machine, size, crosses) for machine in ends_on)
    if end.is_first:
        return held, seconds
    own = replace(end, split_elements=end.split_elements + end.tied_elements)
    return [layer if layer is not end else own for layer in held], seconds


def waited_for(
    machine: MachineRates, operation: Operation, size: float, group: Sharing, buckets: int, backward: float
) -> float:
    """Seconds of a sum in so many buckets that do not hide behind a micro-batch's backward.

    Buckets are final one after the other, evenly, and are summed in their turn; beside backward at the share
    `overlap` of their speed. The last is final when backward ends, and hides behind nothing. Without overlap
    all are one sum.
    """
    if not machine.overlap:
        return collective_seconds(machine, operation, size, group)
    one = collective_seconds(machine, operation, size / buckets, group)
    return max(one, buckets * one - machine.overlap * backward * (1 - 1 / buckets))


def _buckets(held: Sequence[LayerSizes], elements: float, at: LayoutSizes) -> int:
    """Of about so many bytes in fp32, or with ZeRO-3 one of each layer (`sharding/bucket_layout.py`)."""
    return max(1, len(held) if at.zero == 3 else round(4 * elements / at.bucket_bytes))


def _gathers(held: Sequence[LayerSizes], at: LayoutSizes) -> tuple[float, float]:
    """Elements of experts and of all else that are gathered in a step: what is updated once, or with ZeRO-3
    all of each micro-batch twice, but for blocks that stay, and for adapters.
    """
    found, stay = [0.0, 0.0], at.keep_gathered
    for layer in held:
        times = 2 * at.micro_batches if at.zero == 3 else 1
        if at.zero == 3 and layer.is_block and stay:
            times, stay = 1, stay - 1
        updated = layer.updated(at)
        whole = layer.adapting is not None or at.zero < 3
        for index, elements in enumerate(layer.elements(at)):
            once = updated[index] if whole else 0.0
            found[index] += once + (times * (elements - once) if at.zero == 3 else 0.0)
    return found[0], found[1]


def _read(size: float, at: LayoutSizes, machine: MachineRates) -> float:
    """Seconds of parameters that lie elsewhere, before they are gathered."""
    if at.parameters_home == "device":
        return 0.0
    return size / machine.away(at.parameters_home, "memory.parameters")
