"""A head of one number a token is planned, counted and verified as it is; on 16 bits and frozen, too."""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.costs.layer_flops import model_flops
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.model.construction import bare_model
from hpctrain.model.count import count
from hpctrain.model.part import parameter_list
from hpctrain.model.shape import ModelShape
from hpctrain.plan.memory_plan import plan_memory
from hpctrain.plan.traffic_plan import plan_traffic
from hpctrain.train.layout_verification import compare
from hpctrain.train.scaled_down_deck import scale_down_family
from tests.engines import LLAMA, small_deck, trainer
from tests.memory.test_recompute import predicted, saved_bytes
from tests.plan.rehearse.test_rank_step import listening, of_each, planned, with_waits
from tests.plan.test_memory_plan import held
from tests.plan.test_traffic_plan import sent

VOCABULARY = 61
KEYS = ("objective.kind=reward", "data.validation=0", "run.evaluate_sequences=2")
LAYOUTS: dict[int, list[tuple[str, ...]]] = {
    1: [(), ("precision.compute=bf16",)],
    2: [
        (),
        ("layout.zero=3", "memory.accumulate=sliced"),
        ("layout.zero=2", "precision.compute=bf16", *LLAMA),
        ("layout.tensor=2", *LLAMA),
        ("layout.tensor=2", "layout.sequence_parallel=true", "precision.compute=bf16"),
        ("layout.context=2", *LLAMA),
        ("layout.pipeline=2", "layout.schedule=zb-h1"),
    ],
}


@pytest.mark.mpi(min_size=1, max_size=2)
def test_memory_and_messages_are_those_planned(world: World) -> None:
    for keys in LAYOUTS[world.size]:
        deck = small_deck(*KEYS, *keys)
        made = trainer(world, deck)
        if "layout.zero=3" not in keys:
            assert saved_bytes(made) == predicted(made), keys
        made.train(2)
        stage = made.engine.mesh.coordinate("pipeline")
        here = plan_memory(deck, world.size, VOCABULARY).stages[stage].memory
        assert (here.parameter, here.gradient, here.optimizer) == held(made)[:3], keys
        assert made.activations.bytes == pytest.approx(here.activation, rel=0.01), keys
        if world.size > 1:
            moved = plan_traffic(deck, world.size, VOCABULARY).stages[stage].payload()
            told = sent(world, deck)
            assert moved == told, keys


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("layout", LAYOUTS[2], ids=str)
def test_layouts_are_verified(world: World, layout: tuple[str, ...]) -> None:
    deck = scale_down_family(small_deck(*KEYS, *(key for key in layout if "bf16" not in key)))
    assert deck.objective.kind == "reward"
    for difference in compare(deck, world, make_mesh(deck, world)):
        assert difference.error <= 1e-5, difference


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("layout", LAYOUTS[2], ids=str)
def test_a_rank_does_what_its_programme_says(
    world: World, layout: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    deck = small_deck(*KEYS, *layout)
    made = trainer(world, deck)
    made.train(3)
    with listening(monkeypatch) as told:
        made.train(1)
    assert with_waits(planned(of_each(deck, world.rank, world.size))) == with_waits(told)


@pytest.mark.parametrize("family", [(), LLAMA], ids=["gpt2", "llama"])
def test_it_counts_as_one_row(family: tuple[str, ...]) -> None:
    shapes = [
        ModelShape.of(small_deck(*family, "model.tied=false", *keys), VOCABULARY) for keys in ((), KEYS)
    ]
    tokens, scores = map(count, shapes)
    less = (VOCABULARY - 1) * shapes[0].hidden
    assert tokens.parameters - scores.parameters == less
    of_tokens, of_scores = (model_flops(shape).flops_per_token for shape in shapes)
    assert of_tokens - of_scores == 6 * less
    last = parameter_list(bare_model(shapes[1]))[-1].shard
    assert (last.name, last.shape) == ("score.weight", (1, 32))


@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("compute", ["bf16", "fp16", "fp8"])
def test_16_bits(world: World, compute: str) -> None:
    layouts = [(), ("layout.tensor=2", "layout.sequence_parallel=true"), ("layout.pipeline=2",)]
    for layout in layouts if world.size == 2 else layouts[:1]:
        exact, rough = (
            trainer(world, small_deck(*KEYS, *layout, *keys)).train(1)[0]
            for keys in ((), (f"precision.compute={compute}",))
        )
        within = 0.2 if compute == "fp8" else 0.05
        assert rough.loss == pytest.approx(exact.loss, rel=within)
        assert rough.grad_norm == pytest.approx(exact.grad_norm, rel=within)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_what_is_frozen_stays(world: World) -> None:
    for frozen in ('["score.weight"]', '["embedding.*", "blocks.*", "final_norm.*"]'):
        made = trainer(world, small_deck(*KEYS, "objective.centering=0.1", f"model.frozen={frozen}"))
        before = {name: values.clone() for name, values in made.parameters().items()}
        made.train(1)
        for name, values in made.parameters().items():
            trained = (name == "score.weight") != ("score" in frozen)
            assert torch.equal(values, before[name]) != trained, (frozen, name)
