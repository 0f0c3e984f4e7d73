"""Steps on several kinds of node: where stages lie, and that each goes by the nodes under it.

Tests of plan/time/stage_nodes.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.model.shape import ModelShape
from hpctrain.pipeline.generate import generate_schedule
from hpctrain.pipeline.simulate import StageTimes, simulate
from hpctrain.plan.time.layer_seconds import LayerSizes, layer_seconds, layer_sizes
from hpctrain.plan.time.layout_sizes import LayoutSizes
from hpctrain.plan.time.machine_rates import MachineRates, ProductRates, message_seconds, parse_machine
from hpctrain.plan.time.stage_nodes import StageNodes
from hpctrain.plan.time.step_plan import busiest_seconds, plan_step, split_by_seconds, step_seconds
from tests.engines import small_deck
from tests.plan.time.test_machine_rates import FILE

DECK = small_deck("model.layers=6")
SEVERAL = FILE.replace("ranks_per_node = 4", "ranks_per_node = 2\nnodes = 2")


def sizes_of(deck: Deck) -> tuple[LayerSizes, ...]:
    assert deck.model.vocabulary
    return layer_sizes(ModelShape.of(deck, deck.model.vocabulary))


def kinds(*others: str, first: str = SEVERAL) -> MachineRates:
    """The first kind on two nodes of two ranks, and two nodes of each other, told by its figures."""
    tables = (f'[[machine.others]]\nname = "kind {n}"\nnodes = 2\n{each}\n' for n, each in enumerate(others))
    return parse_machine(first + "".join(tables), "")


ONE = parse_machine(FILE.replace("ranks_per_node = 4", "ranks_per_node = 2"), "")
FAST = (
    "products = { fp32 = { peak = 2e11 } }\nattention = { forward = 2e11, backward = 16e10 }\n"
    "memory_bandwidth = 2e10"
)
"""Twice as fast as the first in all but links."""


def at(pipeline: int, data: int = 1, tensor: int = 1, passes: int = 8, **other: object) -> LayoutSizes:
    plain = LayoutSizes.of(DECK, 1, 2)
    arranged = {"pipeline": pipeline, "data": data, "tensor": tensor, "micro_batches": passes} | other
    return replace(plain, **arranged)


def test_stages_lie_on_the_nodes_that_their_ranks_fill() -> None:
    three = kinds(FAST, "memory_bandwidth = 3e10")
    names = [
        [tuple(kind.name for kind in ground.groups[group]) for group in ground.of_stage]
        for ground in (StageNodes(three, at(p, 12 // p)) for p in (1, 2, 3, 4, 6))
    ]
    slow, fast, other = "ours", "kind 0", "kind 1"
    assert names[0] == [(slow, fast, other)]
    assert names[1] == [(slow, fast), (fast, other)]
    assert names[2] == [(slow,), (fast,), (other,)]
    assert names[3] == [(slow,), (slow, fast), (fast, other), (other,)]
    assert names[4] == [(slow,), (slow,), (fast,), (fast,), (other,), (other,)]
    assert StageNodes(three, at(2, 2)).has_one_kind
    assert not StageNodes(three, at(3, 2)).has_one_kind


def test_more_ranks_than_there_are_nodes_for() -> None:
    machine = kinds(FAST)
    with pytest.raises(
        HpctrainError, match=r"ours: has 4 nodes \(2 of ours, 2 of kind 0\), but 16 ranks with 2 per node"
    ):
        plan_step(small_deck("batch.global_size=32"), 16, 61, machine)
    few = parse_machine(SEVERAL, "")
    with pytest.raises(HpctrainError, match="ours: has 2 nodes, but 8 ranks with 2 per node require 4"):
        plan_step(small_deck("batch.global_size=32"), 8, 61, few)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "dualpipe-v"])
@pytest.mark.parametrize("blocking", [False, True])
def test_kinds_that_are_alike_are_one_to_the_bit(schedule: str, blocking: bool) -> None:
    one = ONE.model_copy(update={"messages": "blocking"}) if blocking else ONE
    first = SEVERAL.replace("nodes = 2", 'nodes = 2\nmessages = "blocking"') if blocking else SEVERAL
    alike = kinds("memory = 5e8", first=first)
    for arranged in (at(2, 4), at(4, 2), at(4, 1, 2, zero=3), at(2, 2, 2)):
        ordered = generate_schedule(schedule, arranged.pipeline, 8, 2 if schedule == "interleaved" else None)
        layers, split = sizes_of(small_deck("model.layers=8")), [8 // ordered.parts] * ordered.parts
        expected = busiest_seconds(layers, arranged, ordered, split, one)
        assert busiest_seconds(layers, arranged, ordered, split, alike) == expected


@pytest.mark.parametrize("split", [(3, 3), (2, 4), (1, 5)])
def test_each_stage_takes_what_its_kind_does(split: tuple[int, int]) -> None:
    """The simulator by itself, with the times of each kind's own layers."""
    machine, layers, arranged = kinds(FAST), sizes_of(DECK), at(2, 4)
    first, *blocks, last = layers
    held = [[first, *blocks[: split[0]]], [*blocks[split[0] :], last]]
    times = []
    for part, kind in zip(held, machine.kinds, strict=True):
        passes = [layer_seconds(layer, arranged, kind) for layer in part]
        times.append(
            [
                sum(sum(getattr(each, name).values()) for each in passes)
                for name in ("forward", "input_gradient", "weight_gradient")
            ]
        )
    schedule = generate_schedule("1f1b", 2, 8, 1)
    message = message_seconds(machine, arranged.rows * first.hidden * arranged.itemsize, True)
    cost = simulate(schedule, StageTimes(*map(list, zip(*times, strict=True)), message)).cost
    causes = step_seconds(layers, arranged, schedule, split, machine)
    after = ("gradients", "parameters", "offload", "optimizer", "fixed")
    assert sum(causes.values()) - sum(causes[cause] for cause in after) == pytest.approx(cost)
    slow = step_seconds(layers, arranged, schedule, split, ONE)
    assert sum(slow.values()) > sum(causes.values())


def test_a_stage_on_two_kinds_goes_by_the_slowest() -> None:
    schedule, layers = generate_schedule("1f1b", 1, 8, 1), sizes_of(DECK)
    both, alone = (step_seconds(layers, at(1, 8), schedule, [6], each) for each in (kinds(FAST), ONE))
    assert both == pytest.approx(alone)
    faster = kinds(FAST).others[0].model_copy(update={"others": ()})
    assert sum(step_seconds(layers, at(1, 8), schedule, [6], faster).values()) < sum(both.values())


def test_what_is_sent_between_kinds_goes_by_the_slower_link() -> None:
    narrow = kinds("between = { bandwidth = 1e6, latency = 2e-5 }")
    within, across = (StageNodes(narrow, at(p, 8 // p)) for p in (1, 2))
    assert {kind.between.bandwidth for kind in within.groups[0] if kind.between} == {1e6}
    (first,), (second,) = (across.groups[group] for group in across.of_stage)
    assert first.between and second.between
    assert (first.between.bandwidth, second.between.bandwidth) == (1e9, 1e6)
    for one, other in ((0, 1), (1, 0)):
        assert {kind.between.bandwidth for kind in across.links(one, other) if kind.between} == {1e6}
    # Stages of one rank: two of each kind on a node, but where kinds meet there are nodes between.
    near = StageNodes(narrow, at(8))
    assert [near.at.crosses(3, stage) for stage in (2, 4)] == [False, True]
    assert {kind.between.bandwidth for kind in near.links(3, 4) if kind.between} == {1e6}


def test_stages_that_are_twice_as_fast_hold_twice_the_blocks() -> None:
    machine, layers = kinds(FAST), sizes_of(small_deck("model.layers=12"))
    nothing = replace(layers[1], matrices=(), core=None, elementwise=(), is_block=False)
    schedule = generate_schedule("1f1b", 4, 8, 1)
    bare = (nothing, *layers[1:-1], nothing)
    assert split_by_seconds(bare, StageNodes(machine, at(4, 2)), schedule) == (2, 2, 4, 4)
    assert split_by_seconds(bare, StageNodes(ONE, at(4, 2)), schedule) == (3, 3, 3, 3)


_STAGES = some.sampled_from([(1, 8), (2, 4), (4, 2), (8, 1)])


@settings(max_examples=40, deadline=None)
@given(
    _STAGES,
    some.sampled_from(["1f1b", "zb-h1", "zb-h2"]),
    some.integers(0, 3),
    some.integers(0, 1),
    some.floats(1.01, 4),
    some.floats(0, 1),
)
def test_a_faster_kind_makes_no_step_slower(
    stages: tuple[int, int], schedule: str, zero: int, which: int, times: float, overlap: float
) -> None:
    machine, arranged = kinds(FAST), at(*stages, zero=zero)
    machine = machine.model_copy(update={"overlap": overlap})
    schedule = "1f1b" if stages[0] == 1 else schedule
    layers, split = sizes_of(small_deck("model.layers=8")), [8 // stages[0]] * stages[0]
    ordered = generate_schedule(schedule, stages[0], 8, None)
    before = sum(step_seconds(layers, arranged, ordered, split, machine).values())
    all_kinds = list(machine.kinds)
    rates = all_kinds[which].products["fp32"]
    faster: dict[str, object] = {
        "products": {"fp32": ProductRates(**{**rates.model_dump(), "peak": times * rates.peak})},
        "memory_bandwidth": times * all_kinds[which].memory_bandwidth,
    }
    all_kinds[which] = all_kinds[which].model_copy(update=faster)
    other = all_kinds[0].model_copy(update={"others": tuple(all_kinds[1:])})
    assert sum(step_seconds(layers, arranged, ordered, split, other).values()) <= before * (1 + 1e-9)
