"""Planned seconds on links of one speed: bytes as the plan of traffic has them, buckets that hide, homes.

Tests of plan/time/reduction_seconds.py; of plan/time/layer_seconds.py and plan/time/step_plan.py as far as
ranks talk.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.plan.time.machine_rates import GroupPlacement, MachineRates, collective_seconds, parse_machine
from hpctrain.plan.time.reduction_seconds import exposed_seconds
from hpctrain.plan.time.step_plan import plan_step
from hpctrain.plan.traffic_plan import plan_traffic
from tests.engines import LLAMA, small_deck
from tests.plan.time.test_machine_rates import FILE

VOCABULARY = 61
MIXTURE = (*LLAMA, "model.experts.count=4", "model.experts.per_token=4", "model.experts.shared=1")
SPLIT = ("layout.tensor=2", "layout.sequence_parallel=true")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "data": (4, ()),
    "zero 1": (4, ("layout.zero=1",)),
    "zero 2, half": (4, ("layout.zero=2", "precision.compute=bf16")),
    "zero 3": (4, ("layout.zero=3",)),
    "zero 3, again": (2, ("layout.zero=3", "memory.recompute=full")),
    "zero 3, kept": (4, ("layout.zero=3", "memory.keep_gathered=1")),
    "zero 2, sliced": (2, ("layout.zero=2", "memory.accumulate=sliced")),
    "zero 3, sliced": (2, ("layout.zero=3", "memory.accumulate=sliced")),
    "zero 1, hybrid": (4, ("layout.zero=1", "layout.zero_group=2")),
    "zero 3, hybrid": (4, ("layout.zero=3", "layout.zero_group=2")),
    "adapters": (2, ("model.adapters.rank=3", "layout.zero=1")),
    "adapters, zero 3": (4, ("model.adapters.rank=3", "layout.zero=3")),
    "adapters, tensor": (2, ("model.adapters.rank=3", "layout.tensor=2")),
    "adapters, sequence": (2, ("model.adapters.rank=3", *SPLIT)),
    "tensor": (2, ("layout.tensor=2",)),
    "tensor, llama": (2, ("layout.tensor=2", *LLAMA)),
    "tensor, again": (2, ("layout.tensor=2", "memory.recompute=full")),
    "sequence": (2, SPLIT),
    "sequence of 4": (4, ("layout.tensor=4", "layout.sequence_parallel=true")),
    "sequence, again": (2, (*SPLIT, "memory.recompute=full")),
    "sequence, selective": (2, (*SPLIT, "memory.recompute=selective")),
    "ring": (2, ("layout.context=2", *LLAMA)),
    "ring of 4": (4, ("layout.context=4",)),
    "ring, again": (2, ("layout.context=2", "memory.recompute=full")),
    "heads": (2, ("layout.context=2", "layout.context_form=all_to_all")),
    "heads, llama": (2, ("layout.context=2", "layout.context_form=all_to_all", *LLAMA)),
    "pipeline": (2, ("layout.pipeline=2",)),
    "pipeline, untied": (2, ("layout.pipeline=2", "model.tied=false")),
    "pipeline of 4": (4, ("layout.pipeline=4", "model.layers=4")),
    "interleaved": (
        2,
        ("layout.pipeline=2", "layout.chunks=2", "layout.schedule=interleaved", "model.layers=4"),
    ),
    "pipeline, tensor": (4, ("layout.pipeline=2", "layout.tensor=2", "batch.global_size=32")),
    "pipeline, data": (4, ("layout.pipeline=2", "layout.zero=1")),
    "tensor, context": (4, ("layout.tensor=2", "layout.context=2")),
    "experts": (2, (*MIXTURE, "layout.expert=2")),
    "experts, zero": (4, (*MIXTURE, "layout.expert=2", "layout.zero=1")),
}
AXES = {
    ("tensor",): ("tensor",),
    ("context",): ("context",),
    ("expert",): ("expert",),
    ("gradients", "parameters", "messages"): ("data x context", "expert_data", "replicas", "pipeline"),
}
"""Which causes send along which axes. Tied embeddings, which count with gradients, go along the pipeline."""


def even(ranks_per_node: int = 8, more: str = "") -> MachineRates:
    """A machine whose links all send 1 GB/s and have no latency."""
    text = FILE.replace('name = "ours"', f'name = "ours"\nmessages = "blocking"\n{more}')
    text = text.replace("latency = 1e-6", "latency = 0.0").replace("latency = 1e-5", "latency = 0.0")
    text = text.replace("{ bandwidth = 1e10", "{ bandwidth = 1e9")
    text = text.replace("ranks_per_node = 4", f"ranks_per_node = {ranks_per_node}")
    half = "[machine.products.bf16]\npeak = 1e11\nefficiency = 0.8\nsaturation = 100.0\n"
    return parse_machine(text + half, "even")


def planned(machine: MachineRates, ranks: int, *keys: str) -> Mapping[str, float]:
    deck = small_deck("model.hidden=128", "optimizer.clip=0", *keys)
    return plan_step(deck, ranks, VOCABULARY, machine).seconds_by_cause


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_waited_for_is_what_the_plan_of_traffic_sends(layout: str) -> None:
    """Along every axis, in every layout, as the ledger counts it. Buckets are filled up to a few elements
    more, and the losses that tensor ranks sum, some numbers of a token, are not told.
    """
    ranks, keys = LAYOUTS[layout]
    deck = small_deck("model.hidden=128", "optimizer.clip=0", *keys)
    seconds = planned(even(), ranks, *keys)
    stages = [stage.sent() for stage in plan_traffic(deck, ranks, VOCABULARY).stages]
    for causes, axes in AXES.items():
        told = 1e9 * sum(seconds[cause] for cause in causes)
        sent = [sum(stage.get(axis, 0.0) for axis in axes) for stage in stages]
        assert any(told == pytest.approx(each, rel=0.015) for each in sent), (axes, told, sent)


def test_buckets_hide_behind_backward_but_for_the_last() -> None:
    machine, group = even(more="overlap = 1.0"), GroupPlacement(4, 4)
    whole = collective_seconds(machine, "all_reduce", 8e9, group)

    def left(buckets: int, backward: float) -> float:
        return exposed_seconds(machine, "all_reduce", 8e9, group, buckets, backward)

    assert left(8, 1e9) == pytest.approx(whole / 8)
    assert left(1, 1e9) == pytest.approx(whole)
    # The first of 4 is final after a quarter of backward: then all go on, one after the other.
    assert left(4, 4.0) == pytest.approx(whole - 3.0)
    assert exposed_seconds(even(), "all_reduce", 8e9, group, 8, 1e9) == pytest.approx(whole)


def test_what_is_left_of_buckets_is_what_their_simulation_leaves() -> None:
    for share in (1.0, 0.5, 0.2):
        machine, group = even(more=f"overlap = {share}"), GroupPlacement(2, 2)
        for buckets in (1, 2, 5, 16):
            for backward in (0.0, 0.7, 3.0, 50.0):
                one = collective_seconds(machine, "all_reduce", 4e9 / buckets, group)
                free, left = 0.0, 0.0
                for number in range(1, buckets + 1):
                    begin = max(free, backward * number / buckets)
                    free = begin + one / share
                    # What is not done when backward ends goes at full speed.
                    left += one - min(one, max(0.0, backward - begin) * share)
                told = exposed_seconds(machine, "all_reduce", 4e9, group, buckets, backward)
                assert told == pytest.approx(left), (share, buckets, backward)


def test_less_buckets_and_less_overlap_hide_less() -> None:
    keys = ("batch.global_size=8", "communication.bucket_bytes=100 kB")
    seconds = [planned(even(more=f"overlap = {share}"), 2, *keys)["gradients"] for share in (0.0, 0.5, 1.0)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[2] > 0
    one = planned(even(more="overlap = 1.0"), 2, "communication.bucket_bytes=1 GB")["gradients"]
    assert one == pytest.approx(planned(even(), 2)["gradients"])


def test_what_lies_elsewhere_takes_its_way() -> None:
    away = "disk = 1e6\nhost = { bandwidth = 1e7, memory_bandwidth = 1e9 }"
    machine, faster = even(more=away), even(more=away.replace("1e6", "2e6").replace("1e7", "2e7"))
    parameters = ("memory.parameters=disk", "memory.optimizer=disk", "layout.zero=3")
    for keys in (("memory.optimizer=disk",), parameters, ("memory.activations=disk",)):
        assert planned(machine, 2)["offload"] == 0
        slow, quick = (planned(each, 2, *keys)["offload"] for each in (machine, faster))
        assert slow > quick > 0
    state = planned(machine, 2, *parameters[1:])["offload"]
    assert planned(machine, 2, *parameters)["offload"] > state + planned(even(more=away), 2)["offload"]


@pytest.mark.parametrize("key", ["memory.optimizer", "memory.parameters", "memory.activations"])
def test_a_machine_that_lacks_what_the_deck_needs_says_what(key: str) -> None:
    keys = (f"{key}=disk", "layout.zero=3", *(["memory.optimizer=disk"] * (key == "memory.parameters")))
    with pytest.raises(HpctrainError, match=rf"ours: machine\.disk is missing, which {key} = disk requires"):
        planned(even(), 2, *keys)
