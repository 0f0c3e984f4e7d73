"""Seconds of gradient reductions, gathering of parameters, and the update, on a rank of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpctrain.plan.time.layer_seconds import LayerSizes
from hpctrain.plan.time.layout_sizes import LayoutSizes
from hpctrain.plan.time.machine_rates import (
    GroupPlacement,
    MachineRates,
    Operation,
    collective_seconds,
    gather_seconds,
    message_seconds,
)
from hpctrain.plan.time.update_seconds import update_seconds


def after_backward(
    stage_layers: Sequence[LayerSizes],
    backward: float,
    at: LayoutSizes,
    machine: MachineRates,
    ends: Sequence[MachineRates] = (),
) -> dict[str, float]:
    """Return the seconds of a stage outside of its passes, by cause.

    Args:
        stage_layers: Layers of the stage.
        backward: Seconds of the last backward pass, through the part that ends last.
        at: Sizes of the layout.
        machine: Rates of the nodes of the stage.
        ends: Rates of the nodes of the first and the last stage, if they are different.
    """
    stage_layers, exchanged = _with_tied(stage_layers, at, ends or (machine,))
    causes = {"gradients": exchanged, "parameters": 0.0, "offload": 0.0, "fixed": machine.fixed}
    (expert_group, expert_replicas), (group, replicas) = at.expert_cut, at.data_cut
    elements = [
        sum(sizes) for sizes in zip(*(layer.trained_elements(at) for layer in stage_layers), strict=True)
    ]
    gathers = _gathers(stage_layers, at)
    for index, (cut, copies) in enumerate(((expert_group, expert_replicas), (group, replicas))):
        if not elements[index] and not gathers[index]:
            continue
        size = elements[index] * at.gradient_itemsize
        operation: Operation = "reduce_scatter" if at.zero else "all_reduce"
        buckets = _buckets(stage_layers, elements[index], at)
        causes["gradients"] += at.reductions * exposed_seconds(
            machine, operation, size, cut, buckets, backward
        )
        if not at.zero:
            continue
        # ZeRO splits within a group. Groups with the same pieces then add their sums.
        causes["gradients"] += collective_seconds(machine, "all_reduce", size / cut.size, copies)
        size = gathers[index] * at.itemsize
        hiding = 1 - machine.overlap if at.zero == 3 else 1.0
        causes["parameters"] += hiding * gather_seconds(machine, size, cut)
        causes["offload"] += _offload_seconds(size / cut.size, at, machine)
    if at.tensor > 1 and (reduced := sum(layer.elements_to_reduce(at) for layer in stage_layers)):
        size = reduced * at.gradient_itemsize
        causes["tensor"] = collective_seconds(machine, "all_reduce", size, at.tensor_ranks)
    cuts = (expert_group.size, group.size) if at.zero else (1, 1)
    for cause, seconds in update_seconds(stage_layers, cuts, at, machine).items():
        causes[cause] = causes.get(cause, 0.0) + seconds
    return causes


def _with_tied(
    stage_layers: Sequence[LayerSizes], at: LayoutSizes, ends_on: Sequence[MachineRates]
) -> tuple[Sequence[LayerSizes], float]:
    """Return the layers with a second copy of a tied table, and seconds to add both gradients.

    The last stage has this copy if the first layer is on another stage.
    """
    ends = [layer for layer in stage_layers if layer.tied_elements]
    if at.pipeline == 1 or len(ends) != 1:
        return stage_layers, 0.0
    (end,) = ends
    size = end.tied_elements / at.tensor * at.gradient_itemsize
    crosses = at.crosses(0, at.pipeline - 1)
    seconds = max(message_seconds(machine, size, crosses) for machine in ends_on)
    if end.is_first:
        return stage_layers, seconds
    own_end = replace(end, split_elements=end.split_elements + end.tied_elements)
    return [layer if layer is not end else own_end for layer in stage_layers], seconds


def exposed_seconds(
    machine: MachineRates,
    operation: Operation,
    size: float,
    group: GroupPlacement,
    buckets: int,
    backward: float,
) -> float:
    """Return the seconds of a reduction in several buckets that a backward pass does not hide.

    Buckets become final one after the other at even intervals, and are reduced in turn. During the backward
    pass they have the share `overlap` of their speed. The last one is final when the backward pass ends.
    Without overlap, there is one reduction.
    """
    if not machine.overlap:
        return collective_seconds(machine, operation, size, group)
    one = collective_seconds(machine, operation, size / buckets, group)
    return max(one, buckets * one - machine.overlap * backward * (1 - 1 / buckets))


def _buckets(stage_layers: Sequence[LayerSizes], elements: float, at: LayoutSizes) -> int:
    """Return the number of buckets; with ZeRO-3, one for each layer (`sharding/bucket_layout.py`)."""
    return max(1, len(stage_layers) if at.zero == 3 else round(4 * elements / at.bucket_bytes))


def _gathers(stage_layers: Sequence[LayerSizes], at: LayoutSizes) -> tuple[float, float]:
    """Return the numbers of elements that are gathered in a step: those of experts, and all others.

    Updated elements are gathered once. With ZeRO-3, all are gathered twice per micro-batch, except blocks
    that stay gathered, and adapters.
    """
    gathered, kept_blocks = [0.0, 0.0], at.keep_gathered
    for layer in stage_layers:
        times = 2 * at.micro_batches if at.zero == 3 else 1
        if at.zero == 3 and layer.is_block and kept_blocks:
            times, kept_blocks = 1, kept_blocks - 1
        updated = layer.trained_elements(at)
        gathers_updated = layer.adapter_elements is not None or at.zero < 3
        for index, elements in enumerate(layer.elements(at)):
            updated_elements = updated[index] if gathers_updated else 0.0
            gathered[index] += updated_elements + (
                times * (elements - updated_elements) if at.zero == 3 else 0.0
            )
    return gathered[0], gathered[1]


def _offload_seconds(size: float, at: LayoutSizes, machine: MachineRates) -> float:
    """Return the seconds to read offloaded parameters before they are gathered."""
    if at.parameters_location == "device":
        return 0.0
    return size / machine.offload_bandwidth(at.parameters_location, "memory.parameters")
