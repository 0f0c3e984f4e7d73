"""What a layer keeps for backward, and waits for where that lies elsewhere.

Tests of plan/time/layer_seconds.py.
"""

from __future__ import annotations

import pytest

from hpctrain.comm.planned import PlannedMesh
from hpctrain.costs.layer_bytes.activation_sizes import total
from hpctrain.costs.part_bytes import part_bytes
from hpctrain.engine.layout.layer_placement import place_by_flops
from hpctrain.engine.mesh_sizes import axis_sizes
from hpctrain.engine.stages.planned_stage import PipelinePosition, plan_stage
from hpctrain.errors import HpctrainError
from hpctrain.host.device import device_kind
from hpctrain.model.shape import ModelShape
from hpctrain.plan.time.layer_seconds import LayerSeconds, largest_share, layer_seconds, layer_sizes
from hpctrain.plan.time.layout_sizes import LayoutSizes
from hpctrain.plan.time.machine_rates import MachineRates, parse_machine
from tests.engines import LLAMA, small_deck
from tests.plan.time.test_machine_rates import FILE

VOCABULARY = 61
BANDWIDTH = 1e5
HALF = "[machine.products.bf16]\npeak = 1e11\nefficiency = 0.8\nsaturation = 100.0\n"
DISK = FILE.replace('name = "ours"', f'name = "ours"\ndisk = {BANDWIDTH}') + HALF


def seconds_of(machine: MachineRates, ranks: int, *keys: str) -> LayerSeconds:
    """Of the first block."""
    deck = small_deck(*keys)
    at = LayoutSizes.of(deck, ranks, 8)
    return layer_seconds(layer_sizes(ModelShape.of(deck, VOCABULARY))[1], at, machine)


@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        (1, ()),
        (1, LLAMA),
        (1, ("precision.compute=bf16", "memory.recompute=selective")),
        (1, ("memory.recompute=full",)),
        (2, ("layout.tensor=2",)),
        (2, ("layout.tensor=2", "layout.sequence_parallel=true", "precision.compute=bf16", *LLAMA)),
        (2, ("layout.context=2",)),
    ],
)
def test_what_lies_on_a_disk_goes_and_comes_back(ranks: int, keys: tuple[str, ...]) -> None:
    """As many bytes as autograd saves, of which those hide that move while the block computes."""
    deck = small_deck(*keys)
    shape, sizes = ModelShape.of(deck, VOCABULARY), axis_sizes(deck, ranks)
    placement, mesh = place_by_flops(deck, shape, sizes["data"]), PlannedMesh(sizes, 0, 8)
    schedule, device = placement.schedule_of(1), device_kind(deck.run.device)
    stage = plan_stage(deck, shape, mesh, PipelinePosition(schedule, placement.split, 0), device)
    (part,) = part_bytes(deck, stage.models, True, deck.memory.recompute)
    moving = total(part.saved_segments()[0]) / BANDWIDTH
    machine = parse_machine(DISK, "")
    kept = seconds_of(machine, ranks, *keys)
    there = seconds_of(machine, ranks, *keys, "memory.activations=disk")
    forward = sum(kept.forward.values())
    backward = sum(kept.input_gradient.values()) + sum(kept.weight_gradient.values())
    assert moving > forward + backward > 0
    assert there.forward["offload"] == pytest.approx(moving - forward, rel=0.05)
    assert there.input_gradient["offload"] == pytest.approx(moving - backward, rel=0.05)
    assert "offload" not in kept.forward


def test_what_moves_while_a_block_computes_is_not_waited_for() -> None:
    fast = parse_machine(DISK.replace(f"disk = {BANDWIDTH}", "disk = 1e15"), "")
    there = seconds_of(fast, 1, "memory.activations=disk")
    assert there.forward["offload"] == there.input_gradient["offload"] == 0


@pytest.mark.parametrize(
    "figure",
    ["saturation = 1e308", "launch = 1e308"],
)
def test_figures_by_which_a_layer_never_ends(figure: str) -> None:
    known = "saturation = 100.0" if "saturation" in figure else "memory = 1e9"
    text = FILE.replace(known, figure if "saturation" in figure else f"{known}\n{figure}")
    deck = small_deck()
    _, block, *_ = layer_sizes(ModelShape.of(deck, 61), ())
    machine, at = parse_machine(text, ""), LayoutSizes.of(deck, 1, 4)
    with pytest.raises(HpctrainError, match="ours: its rates predict inf s for products of a single layer"):
        layer_seconds(block, at, machine)


def test_the_rank_with_most_heads_is_planned() -> None:
    assert largest_share(9, 3, 2) == 6 / 4.5
    assert largest_share(14, 2, 4) == 4 / 3.5
    assert largest_share(12, 4, 8) == 2 / 1.5
    assert largest_share(8, 2, 4) == 1.0
