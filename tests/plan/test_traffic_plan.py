"""Bytes of a step by axis, planned: equal to the byte to the ledger of a run's steps.

Tests of comm/planned.py too.
"""

from __future__ import annotations

from typing import get_args

import pytest

from hpctrain.comm.transports.traffic import Traffic
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.communication import Communication
from hpctrain.plan.traffic_plan import PlannedTransfer, plan_traffic
from tests.engines import LLAMA, small_deck, trainer

VOCABULARY = 61


def sent(world: World, deck: Deck, steps: int = 1) -> dict[str, float]:
    """Bytes of a step by axis, the mean of so many after as many others."""
    run = trainer(world, deck)
    run.train(steps)
    world.ledger.reset()
    run.train(steps)
    found: dict[str, float] = {}
    for entry in world.ledger.rows():
        if entry.bytes:
            found[entry.axis] = found.get(entry.axis, 0.0) + entry.bytes / steps
    return dict(sorted(found.items()))


LOCAL = ("layout.tensor=2", "layout.sequence_parallel=true")
GATHERED = ("precision.compute=fp8", "precision.fp8_gather=true", "layout.zero=3")
EIGHT = ("precision.compute=fp8", "precision.fp8_messages=true")
LAYOUTS: dict[int, list[tuple[str, ...]]] = {
    2: [
        (),
        ("layout.zero=1", "precision.compute=bf16", "run.noise_scale_steps=5", *LLAMA),
        ("layout.zero=2", "precision.gradients=compute", "precision.compute=bf16"),
        ("layout.zero=3", "memory.recompute=full"),
        ("layout.zero=3", "memory.accumulate=sliced"),
        ("layout.zero=3", "memory.keep_gathered=1"),
        ("layout.tensor=2", *LLAMA, "model.tied=true"),
        ("layout.tensor=2", "layout.sequence_parallel=true", "memory.recompute=selective"),
        ("layout.context=2", *LLAMA),
        ("layout.context=2", "memory.recompute=full"),
        ("layout.context=2", "layout.context_form=all_to_all"),
        ("layout.context=2", "layout.context_form=all_to_all", *LLAMA, "layout.zero=2"),
        ("layout.pipeline=2", "model.tied=true"),
        ("layout.pipeline=2", "layout.schedule=zb-h1", "batch.global_size=16", "batch.micro_size=1"),
        ("layout.pipeline=2", *LLAMA, "model.mtp_layers=2", "model.tied=false"),
        ("layout.context=2", *LLAMA, "model.mtp_layers=1"),
        ("layout.pipeline=2", "precision.compute=fp8", 'model.frozen=["embedding.*", "blocks.0.*"]'),
        ("model.adapters.rank=3", "layout.zero=1", "precision.compute=bf16"),
        ("model.adapters.rank=3", "layout.zero=3", "memory.recompute=full"),
        ("model.adapters.rank=3", *LOCAL, *LLAMA),
        ("model.adapters.rank=3", "layout.pipeline=2", "layout.schedule=zb-h1"),
        ("layout.zero=2", "precision.compute=fp8"),
        (*GATHERED, "memory.recompute=full", *LLAMA),
        (*GATHERED, "precision.fp8=tensor", "optimizer.name=muon"),
        (*LOCAL, "precision.compute=fp8", "precision.fp8=tensor"),
        (*LOCAL, *EIGHT, "precision.fp8=row", "memory.recompute=full"),
        (*LOCAL, *EIGHT, "model.hidden=64", "precision.fp8=mx"),
        (*LOCAL, *EIGHT),
        ("optimizer.name=muon",),
        ("optimizer.name=muon", "layout.zero=3"),
        ("optimizer.name=muon", "layout.tensor=2", *LLAMA),
    ],
    4: [
        ("layout.tensor=2", "layout.zero=1", "layout.zero_group=1"),
        ("layout.zero=1", "layout.zero_group=2"),
        ("layout.zero=3", "layout.zero_group=2", "memory.accumulate=sliced"),
        ("layout.context=4", *LLAMA),
        ("layout.context=2", "layout.tensor=2", "layout.sequence_parallel=true"),
        ("layout.pipeline=2", "layout.context=2", "layout.context_form=all_to_all"),
        ("layout.pipeline=2", "layout.zero=3"),
        (
            "layout.pipeline=2",
            "layout.chunks=2",
            "layout.schedule=interleaved",
            "model.layers=4",
            "layout.zero=1",
        ),
        ("layout.pipeline=2", "layout.tensor=2", "batch.global_size=32"),
        ("layout.tensor=2", "layout.zero=3", "precision.compute=fp8", "precision.fp8=tensor"),
        (*GATHERED, "layout.pipeline=2", "optimizer.name=muon"),
    ],
}


@pytest.mark.mpi(min_size=2, max_size=4)
def test_a_run_sends_what_was_planned(world: World) -> None:
    for keys in LAYOUTS.get(world.size, []):
        deck = small_deck(*keys)
        planned = plan_traffic(deck, world.size, VOCABULARY)
        stage = world.rank // (world.size // len(planned.stages))
        assert planned.stages[stage].payload() == sent(world, deck), keys


MORE = {"onebit": ("communication.warmup=1",)}
"""What a form does not do without."""


@pytest.mark.mpi(min_size=2, max_size=2)
def test_every_form_of_sums_sends_what_was_planned(world: World) -> None:
    """By the schema: a form that is added is met here too."""
    exact = plan_traffic(small_deck(), world.size, VOCABULARY).largest.payload()["data x context"]
    forms = get_args(Communication.model_fields["compress"].annotation)
    assert len(forms) > 5
    for form in forms:
        for zero in (0, 1):
            keys = (f"communication.compress={form}", f"layout.zero={zero}", *MORE.get(form, ()))
            deck = small_deck(*keys)
            planned = plan_traffic(deck, world.size, VOCABULARY)
            told = sent(world, deck)
            # Where pieces are uneven, ranks do not send alike: planned is the first one.
            assert world.rank or planned.stages[0].payload() == told, form
            assert (planned.largest.payload()["data x context"] < exact) == (form != "none"), form


LOCAL = {
    "average": ("layout.zero=1",),
    "diloco": ("layout.local_steps.format=int8",),
    "streaming": (
        "layout.local_steps.outer=diloco",
        "layout.local_steps.fragments=2",
        "layout.local_steps.delay=1",
    ),
}


@pytest.mark.mpi(min_size=2, max_size=4)
@pytest.mark.parametrize("form", LOCAL)
def test_replicas_send_what_was_planned(world: World, form: str) -> None:
    """The mean over the steps between two meetings, where they meet at all."""
    if world.size == 3:
        pytest.skip("two replicas are to be alike")
    keys = ("layout.local_steps.replicas=2", "layout.local_steps.steps=4", *LOCAL[form])
    outer = () if form == "streaming" else (f"layout.local_steps.outer={form}",)
    deck = small_deck(*keys, *outer)
    planned, told = plan_traffic(deck, world.size, VOCABULARY).stages[0].payload(), sent(world, deck, 4)
    # What figures of outer steps add to those that all ranks sum is left out.
    assert planned.pop("world") <= told.pop("world")
    assert world.rank or planned == told
    assert planned["replicas"] > 0


@pytest.mark.mpi(min_size=2, max_size=2)
def test_experts_are_planned_where_loads_are_even(world: World) -> None:
    """Sums of gradients to the byte, what experts get up to the routers' choices."""
    deck = small_deck(*LLAMA, "model.experts.count=4", "layout.expert=2", "model.experts.per_token=4")
    planned = plan_traffic(deck, world.size, VOCABULARY)
    assert not planned.complete
    payload, real = planned.stages[0].payload(), sent(world, deck)
    assert payload["data x context"] == real["data x context"]
    assert payload["expert"] == pytest.approx(real["expert"], rel=0.01)


def test_compiled_functions_communicate_as_torch_does() -> None:
    keys = ("layout.tensor=2", "layout.pipeline=2", "layout.sequence_parallel=true")
    plans = [plan_traffic(small_deck(*keys, f"machine.compile={each}"), 4, 61) for each in ("true", "false")]
    assert plans[0] == plans[1] and plans[0].stages


def test_inside_a_node_nothing_passes_a_link() -> None:
    deck = small_deck("layout.tensor=2")

    def rounds(per_node: int, axis: str) -> int:
        (step,) = plan_traffic(deck, 4, VOCABULARY, per_node).stages[0].steps
        return sum(moved.traffic.rounds for moved in step if moved.axis == axis)

    assert rounds(1, "tensor") > 0
    assert rounds(2, "tensor") == 0
    assert rounds(2, "data x context") > 0
    assert rounds(4, "data x context") == 0


def test_large_sums_over_nodes_cross_links_once() -> None:
    """Of two nodes of two ranks each rank carries a half there or back; by messages all of it."""
    keys = ("model.hidden=128", "communication.bucket_bytes=10 MB", "communication.ranks_per_node=2")

    def sums(transport: str) -> list[PlannedTransfer]:
        deck = small_deck(*keys, f"communication.transport={transport}")
        (step,) = plan_traffic(deck, 4, VOCABULARY, 2).stages[0].steps
        return [moved for moved in step if moved.axis == "data x context" and moved.payload > 1 << 20]

    assert sums("shared")
    for moved in sums("shared"):
        assert moved.traffic == Traffic(moved.payload // 4, moved.payload // 4, 2)
    for moved in sums("mpi"):
        assert moved.traffic == Traffic(moved.payload // 2, moved.payload // 2, 2)


def test_sums_are_started_as_gradients_come() -> None:
    (step,) = plan_traffic(small_deck(), 2, VOCABULARY).stages[0].steps
    begun = [moved.start for moved in step if moved.axis == "data x context"]
    assert len(begun) > 2
    assert begun == sorted(begun)
    assert 0 < begun[0] < 1 == begun[-1]
