"""Plans of mixtures of experts: memory and exchanges are those of runs whose experts' loads are even.

Tests of plan/plan_text.py and costs/layer_bytes/mixture_bytes.py, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.costs.layer_flops import model_flops
from hpctrain.costs.reduction_bytes import synchronizer_bytes
from hpctrain.deck.schema import Deck
from hpctrain.model.count import count
from hpctrain.model.mixtures.router import Router
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.experts.dispatch import Dispatch
from hpctrain.plan.deck_plan import PlanOptions, plan_deck
from hpctrain.plan.memory_plan import plan_memory
from hpctrain.plan.plan_text import plan_text
from tests.engines import LLAMA, small_deck, trainer
from tests.plan.test_memory_plan import held

VOCABULARY = 61
MIXTURE = (*LLAMA, "model.experts.count=4", "model.experts.mlp=40")
# Experts have 3.5 units of 16-bit rows each, so that each has half a unit of padding, the mean in a run.
HALF_UNITS = ("batch.sequence=112", "batch.micro_size=4")
HALF_UNITS_OF_TWO_RANKS = ("batch.sequence=112", "batch.micro_size=2")


def choose_in_turn(router: Router, scores: Tensor) -> Tensor:
    """Return experts in turn, whatever the scores, so that all have as many tokens."""
    tokens, experts = scores.shape
    slots = torch.arange(router.settings.per_token)
    return (torch.arange(tokens).unsqueeze(1) + slots) % experts


@pytest.fixture
def even(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens go to experts in turn, whatever the scores."""
    monkeypatch.setattr(Router, "choose", choose_in_turn)


GATED = ("model.experts.shared_gate=true", "model.experts.pattern=[false,true]")

LAYOUTS: dict[int, list[tuple[str, ...]]] = {
    1: [
        (),
        ("model.experts.shared=1",),
        ("model.experts.shared=2", "model.dropout=0.1"),
        ("model.experts.dense_first=1", "model.layers=3"),
        ("model.experts.every=2", "model.layers=4"),
        ("model.experts.capacity=1.0",),
        ("model.experts.capacity=0.5",),
        ("model.experts.router=sigmoid", "model.experts.balance=bias"),
        ("model.experts.router=sigmoid", "model.experts.router_z_loss=0.01"),
        ("model.experts.balance_over=sequence", "model.experts.router_normalize=false"),
        ("model.experts.balance_over=step", "model.experts.router_scale=2.5"),
        ("model.experts.balance=none",),
        ("model.activation=geglu", "model.experts.shared=1"),
        ("model.activation=relu2", "model.experts.shared=1"),
        ("model.family=gpt-oss", "model.experts.shared=1", "model.experts.shared_gate=true"),
        ("precision.compute=bf16", *HALF_UNITS),
    ],
    2: [
        ("layout.expert=2",),
        ("layout.expert=2", "model.experts.shared=1"),
        ("layout.expert=2", "model.experts.dense_first=1", "model.layers=3"),
        ("layout.expert=2", "precision.compute=bf16", *HALF_UNITS_OF_TWO_RANKS),
        ("layout.expert_tensor=2",),
        ("layout.expert_tensor=2", "precision.compute=bf16", *HALF_UNITS_OF_TWO_RANKS),
        ("layout.tensor=2",),
        ("layout.tensor=2", "layout.expert=2", "layout.sequence_parallel=true", "model.experts.shared=1"),
        ("layout.tensor=2", "layout.expert_tensor=2", "model.experts.shared=1"),
        ("layout.tensor=2", "layout.sequence_parallel=true", "model.experts.shared=1", *GATED),
        ("layout.context=2", "layout.expert=2"),
        ("layout.pipeline=2",),
        ("layout.pipeline=2", "model.experts.dense_first=2", "model.layers=4"),
    ],
    4: [
        ("layout.expert=4",),
        ("layout.expert=2", "layout.expert_tensor=2"),
        ("layout.expert=2", "layout.tensor=2", "layout.sequence_parallel=true"),
        ("layout.expert=2", "layout.pipeline=2", "layout.schedule=1f1b"),
        ("layout.expert=2", "layout.pipeline=2", "layout.schedule=zb-h1", "model.layers=4"),
    ],
}


def mixture(*overrides: str) -> Deck:
    return small_deck(*MIXTURE, *overrides)


def expect_activations(world: World, deck: Deck, besides: int = 0) -> None:
    """The plan and the count of what a rank keeps agree, but for so many bytes that only the count has."""
    training = trainer(world, deck)
    planned = plan_memory(deck, world.size, VOCABULARY, schedule=training.engine.schedule)
    training.train(1)
    here = planned.stages[training.engine.mesh.coordinate("pipeline")].memory
    training.engine.close()
    found = training.activations.bytes - besides
    assert found == pytest.approx(here.activation, rel=0.001), (deck.model, deck.layout)


@pytest.mark.sampled(2)
@pytest.mark.mpi
@pytest.mark.parametrize("recompute", ["none", "full", "selective", "sqrt"])
def test_activations_are_those_that_are_kept(world: World, even: None, recompute: str) -> None:
    for layout in LAYOUTS.get(world.size, []):
        expect_activations(world, mixture(*layout, f"memory.recompute={recompute}"))


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("more", [(), ("model.experts.shared=1",), ("model.dropout=0.1",)])
def test_activations_of_split_backward_are_those_that_are_kept(
    world: World, even: None, more: tuple[str, ...]
) -> None:
    """What waits for W is kept by the queue of weight gradients, not by autograd."""
    split = ("layout.pipeline=2", "layout.schedule=zb-h1", "model.layers=4")
    for recompute in ("none", "full", "selective"):
        expect_activations(world, mixture(*split, *more, f"memory.recompute={recompute}"))


@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_activations_in_fewer_bits_are_those_that_are_kept(world: World, even: None, form: str) -> None:
    """Rows of experts are features of tokens too; a router's scores stay as they are."""
    layouts: list[tuple[str, ...]] = [(), ("model.experts.shared=1",)]
    if world.size > 1:
        layouts = [("layout.expert=2",), ("layout.tensor=2",)]
    for layout in layouts:
        wide = ("batch.sequence=256", "batch.micro_size=4", "model.layers=3")
        packed = mixture(*layout, *wide, f"memory.activation_format={form}")
        # The first storage compressed is there in both forms for a moment, which plans count elsewhere.
        hidden = 4 * 256 * 32
        expect_activations(world, packed, 2 * hidden if form == "bf16" else hidden + hidden // 256 * 4)
        exact = plan_memory(mixture(*layout, *wide), world.size, VOCABULARY).stages[0].memory
        assert (
            plan_memory(packed, world.size, VOCABULARY).stages[0].memory.activation < 0.7 * exact.activation
        )


@pytest.mark.sampled(2)
@pytest.mark.mpi
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_model_states_are_those_of_a_run(world: World, zero: int) -> None:
    layouts: dict[int, list[tuple[str, ...]]] = {
        1: [("model.experts.shared=1", "model.experts.dense_first=1")] if zero < 3 else [],
        2: [(), ("layout.expert=2",), ("layout.expert_tensor=2",)],
        4: [("layout.expert=2",), ("layout.expert=2", "layout.tensor=2")],
    }
    for layout in layouts.get(world.size, []):
        deck = mixture(*layout, "model.experts.balance=bias", f"layout.zero={zero}")
        training = trainer(world, deck)
        training.train(2)
        planned = plan_memory(deck, world.size, VOCABULARY).stages[0].memory
        training.engine.close()
        biases = sum(
            isinstance(module, Router) for model in training.engine.stage.models for module in model.modules()
        )
        pools = {bucket.sharding.pool for bucket in training.engine.stage.buckets}
        parameter, gradient, optimizer, _ = held(training)
        received = synchronizer_bytes(training.engine.stage.synchronizer)
        turns = sum(pool.bytes for pool in pools) + received
        found = parameter, gradient, optimizer + biases * 4 * 4, turns
        assert (planned.parameter, planned.gradient, planned.optimizer, planned.buffer) == found, layout


def test_active_parameters_are_those_that_a_token_meets() -> None:
    """By hand, and by them FLOPs: of tokens, positions of blocks, and experts chosen alone."""
    deck = mixture("model.experts.shared=1", "model.experts.dense_first=1", "model.layers=3")
    shape = ModelShape.of(deck, VOCABULARY)
    numbers = count(shape)
    expert, router, dense = 3 * 32 * 40, 4 * 32, 3 * 32 * 48
    attention, norms = 32 * 32 * 2 + 2 * 32 * 8, 2 * 32
    table = 61 * 32 if deck.model.tied else 2 * 61 * 32
    rest = table + 32 + 3 * (attention + norms) + dense + 2 * router
    assert numbers.parameters == rest + 2 * 5 * expert
    assert numbers.active_parameters == rest + 2 * 3 * expert
    products = 61 * 32 + 3 * attention + dense + 2 * router + 2 * 3 * expert
    assert model_flops(shape).flops_per_token == 6 * products + 12 * 3 * 32 * 32


def exchanged_of_a_step(world: World, deck: Deck) -> tuple[int, int, int]:
    """Bytes that this rank sent to other ranks' experts and back in a step: by the ledger, without the counts
    of rows that precede every exchange there; by the rows that each Dispatch sent; and as planned.
    """
    rows = 0
    exchanges = 0
    meet, start = Dispatch._exchange_counts, Dispatch._start

    def counted_meet(self: Dispatch, counts: Tensor, unit: int) -> None:
        nonlocal exchanges
        exchanges += 1
        meet(self, counts, unit)

    def counted_start(self: Dispatch, copies: Tensor, sent: list[int], received: list[int]) -> Tensor:
        nonlocal rows
        rows += sum(sent) - sent[self.expert.rank]
        return start(self, copies, sent, received)

    training = trainer(world, deck)
    planned = plan_memory(deck, world.size, VOCABULARY, schedule=training.engine.schedule)
    training.train(1)
    ledger = world.ledger
    ledger.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dispatch, "_exchange_counts", counted_meet)
        patch.setattr(Dispatch, "_start", counted_start)
        training.train(1)
    entries = [row for row in ledger.rows() if (row.axis, row.operation) == ("expert", "all_to_all")]
    here = planned.stages[training.engine.mesh.coordinate("pipeline")].exchanged_bytes
    training.engine.close()
    itemsize = 2 if deck.precision.compute == "bf16" else 4
    counts = exchanges * 8 * deck.model.experts.count
    return sum(entry.bytes for entry in entries) - counts, rows * deck.model.hidden * itemsize, here


EXCHANGING: dict[int, list[tuple[str, ...]]] = {
    2: [
        ("layout.expert=2",),
        ("layout.expert=2", "memory.recompute=full"),
        ("layout.expert=2", "memory.recompute=selective", "model.experts.dense_first=1", "model.layers=3"),
        ("layout.expert=2", "precision.compute=bf16"),
        ("layout.expert=2", "layout.tensor=2"),
    ],
    4: [
        ("layout.expert=4",),
        ("layout.expert=2", "layout.expert_tensor=2"),
        ("layout.expert=2", "layout.pipeline=2", "layout.schedule=1f1b"),
    ],
}


@pytest.mark.mpi(min_size=2)
def test_exchanges_are_planned_to_the_byte(world: World, even: None) -> None:
    for layout in EXCHANGING.get(world.size, []):
        ledger, rows, planned = exchanged_of_a_step(world, mixture(*layout))
        assert ledger == rows == planned, layout
        assert planned > 0, layout


@pytest.mark.mpi(min_size=2)
def test_exchanges_of_uneven_loads_are_those_of_the_rows(world: World) -> None:
    for layout in EXCHANGING.get(world.size, []):
        ledger, rows, _ = exchanged_of_a_step(world, mixture(*layout))
        assert ledger == rows > 0, layout


def test_exchanges_are_two_passes_there_and_back() -> None:
    """2 k T h itemsize of a layer and pass, of which one in E ranks' share stays."""
    (only,) = plan_memory(mixture("layout.expert=2", "model.layers=3"), 2, VOCABULARY).stages
    tokens = 8 // 2 * 32
    assert only.exchanged_bytes == 3 * 2 * (2 * 2 * tokens * 32 * 4) // 2


def test_people_are_told_what_is_active_and_what_travels() -> None:
    here = Path(__file__).parents[2] / "inputs/bench/mixture-60m.toml"
    plan = plan_deck(here, 2, ["layout.expert=2"], options=PlanOptions(with_savings=False))
    told = plan_text(plan)
    assert "60.1M parameters, 22.9M of them active, fp32" in told
    assert "A rank exchanges 50.3 MB with the experts of other ranks per step" in told
    alone = plan_text(plan_deck(here, 2, options=PlanOptions(with_savings=False)))
    assert "with the experts of other ranks" not in alone


@pytest.mark.mpi(max_size=2)
def test_where_every_rank_has_all_experts_loads_do_not_matter(world: World) -> None:
    """As many rows as are chosen stay on their rank, whichever experts take them."""
    for recompute in ("none", "full"):
        expect_activations(world, mixture("model.experts.shared=1", f"memory.recompute={recompute}"))
