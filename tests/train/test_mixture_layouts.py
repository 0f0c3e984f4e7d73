"""Mixtures of experts on every layout: losses, gradients and choices of a run's steps are those of one rank.

Tests of comm/mesh.py, sharding/replication.py, sharding/gather.py and model/mixtures/mixture.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.model.mixtures.router import RoutedTokens, Router, Routing
from hpctrain.model.precision import Precision
from tests.engines import LLAMA, Trainer, by_rank_0, reference, small_deck, trainer

# A large epsilon makes updates nearly proportional to gradients, by which rounding stays what it is.
KEYS = (
    *LLAMA,
    "model.layers=4",
    "model.experts.count=4",
    "model.experts.mlp=24",
    "model.experts.balance_loss=0.1",
    "optimizer.epsilon=1.0",
    "learning_rate.peak=0.1",
    "learning_rate.warmup=0",
    "optimizer.clip=0",
)

MODELS = {
    "softmax": ("model.experts.router_z_loss=0.01",),
    "capacity": (
        "model.experts.capacity=1.0",
        "model.experts.balance_over=sequence",
        "model.experts.router_normalize=false",
    ),
    "sigmoid": (
        "model.experts.count=8",
        "model.experts.router=sigmoid",
        "model.experts.router_groups=4",
        "model.experts.router_groups_per_token=2",
        "model.experts.router_scale=2.5",
        "model.experts.shared=1",
        "model.experts.dense_first=1",
        "model.experts.balance=bias",
        "model.experts.balance_rate=0.1",
        "model.experts.balance_over=step",
    ),
    "gpt-oss": (
        "model.family=gpt-oss",
        "model.windows=[9,0]",
        "model.experts.pattern=[true,true,false]",
    ),
    "gated": (
        "model.experts.shared=2",
        "model.experts.shared_gate=true",
        "model.experts.pattern=[false,true]",
        "model.experts.router_normalize=false",
    ),
}

ON_TWO = (
    "layout.expert=2",
    "layout.expert_tensor=2",
    "layout.expert=1",
    "layout.tensor=2 layout.expert=2",
    "layout.tensor=2 layout.expert_tensor=2 layout.sequence_parallel=true",
    "layout.tensor=2 layout.expert=2 layout.sequence_parallel=true memory.recompute=full",
    "layout.context=2 layout.expert=2",
    "layout.context=2 layout.expert_tensor=2 layout.context_form=all_to_all",
    "layout.pipeline=2 layout.schedule=zb-h1",
    "layout.expert=2 layout.zero=1",
    "layout.expert=2 layout.zero=2",
    "layout.expert=2 layout.zero=3",
    "layout.zero=3 memory.recompute=full",
    "layout.expert=2 memory.recompute=full",
    "layout.expert=2 memory.recompute=selective",
)

ON_FOUR = (
    "layout.expert=4",
    "layout.expert=2 layout.expert_tensor=2",
    "layout.tensor=2 layout.expert=4",
    "layout.tensor=2 layout.context=2 layout.expert=2 layout.expert_tensor=2",
    "layout.pipeline=2 layout.expert=2",
    "layout.pipeline=2 layout.expert=2 layout.schedule=interleaved layout.chunks=2",
    "layout.pipeline=2 layout.expert=2 layout.schedule=zb-h1",
    "layout.expert=2 layout.zero=1",
    "layout.expert=2 layout.zero=2 memory.accumulate=sliced batch.micro_size=1",
    "layout.expert=2 layout.zero=3 layout.zero_group=2",
    "layout.tensor=2 layout.expert=2 layout.zero=3 layout.sequence_parallel=true",
    "layout.pipeline=2 layout.expert=2 layout.zero=3 layout.schedule=zb-h1",
)

ON_EIGHT = (
    "layout.pipeline=2 layout.tensor=2 layout.expert=4 layout.sequence_parallel=true",
    "layout.tensor=2 layout.context=2 layout.expert=2 layout.expert_tensor=2 layout.zero=3",
)


@dataclass
class Choices:
    """What routers of this rank have chosen: of each micro-batch and layer, a row for each token and choice.

    A token is known by its layer, its place and what it is; a layer that is computed again chooses again.
    """

    kept: dict[tuple[int, str], tuple[Any, Tensor]] = field(default_factory=dict)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Within, of every router."""
        forward = Router.forward

        def recording(router: Router, rows: Tensor, tokens: RoutedTokens, inputs: Any) -> Routing:
            routing = forward(router, rows, tokens, inputs)
            order = inputs.positions.argsort()
            local = order[torch.searchsorted(inputs.positions[order], tokens.positions)]
            token = inputs.tokens[local, tokens.samples]
            accepted = routing.accepted_choices
            kept = torch.ones_like(routing.experts) if accepted is None else accepted.long()
            layer = torch.full_like(token, int(router.name.split(".")[1]))
            of_token = torch.stack((layer, tokens.positions, token), dim=1)
            chosen = torch.cat((of_token, routing.experts, kept), dim=1)
            self.kept[id(inputs), router.name] = (inputs, chosen)
            return routing

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Router, "forward", recording)
            yield

    def of_all(self, world: World) -> list[list[int]]:
        """Those of all ranks, sorted; every token of a micro-batch is some rank's. Collective."""
        own = [row for _, chosen in self.kept.values() for row in chosen.tolist()]
        return sorted(row for rank in world.everyone.all_gather_object(own) for row in rank)


@dataclass
class Step:
    """What a step came to."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    choices: list[list[int]]


def steps(run: Trainer, world: World) -> list[Step]:
    """Two: the second one knows what is needed in which order, and what the first one learned."""
    done = []
    for _ in range(2):
        choices = Choices()
        with choices.recorded():
            result = run.train_step()
        gradients = {name: gradient.clone() for name, gradient in run.gradients().items()}
        done.append(Step(result.loss, result.grad_norm, gradients, choices.of_all(world)))
    return done


def expected_steps(world: World, deck: Deck) -> list[Step]:
    """Those of one rank."""
    alone = world.single_rank_world() if world.rank == 0 else None
    return by_rank_0(world, lambda: steps(reference(world, deck), alone or world))


def assert_same(world: World, deck: Deck, tolerance: float) -> None:
    """The deck's steps are those of one rank. Collective."""
    expected = expected_steps(world, deck)
    run = trainer(world, deck)
    shards = {s.parameter.shard.name: s.parameter.shard for b in run.engine.stage.buckets for s in b.segments}
    for measured, theirs in zip(steps(run, world), expected, strict=True):
        assert measured.choices == theirs.choices
        # Both figures are fp32, whatever they are made of.
        assert measured.loss == pytest.approx(theirs.loss, rel=max(1e-6, tolerance))
        assert measured.norm == pytest.approx(theirs.norm, rel=max(1e-6, tolerance))
        assert measured.gradients.keys() == shards.keys()
        for name, gradient in measured.gradients.items():
            whole = theirs.gradients[name]
            # What softmax sees of queries and keys nearly cancels.
            scale = max(
                float(theirs.gradients[name.replace(part, "value")].abs().max())
                for part in ("query", "key", "value")
                if name.replace(part, "value") in theirs.gradients
            )
            error = float((gradient - shards[name].take(whole)).abs().max()) / scale
            assert error <= tolerance, (name, error)


def deck_of(model: str, layout: str) -> Deck:
    """A model of MODELS on a layout."""
    return small_deck(*KEYS, *MODELS[model], *layout.split())


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("layout", ON_TWO)
def test_steps_on_two_ranks_are_those_of_one(world: World, layout: str) -> None:
    assert_same(world, deck_of("softmax", layout), 1e-5)


@pytest.mark.mpi(min_size=4, max_size=4)
@pytest.mark.parametrize("layout", ON_FOUR)
def test_steps_on_four_ranks_are_those_of_one(world: World, layout: str) -> None:
    assert_same(world, deck_of("softmax", layout), 1e-5)


@pytest.mark.mpi(min_size=8, max_size=8)
@pytest.mark.parametrize("layout", ON_EIGHT)
def test_steps_on_eight_ranks_are_those_of_one(world: World, layout: str) -> None:
    assert_same(world, deck_of("softmax", layout), 1e-5)


@pytest.mark.sampled(3)
@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("model", ["gpt-oss", "gated"])
@pytest.mark.parametrize(
    "layout",
    [
        "layout.expert=2",
        "layout.expert_tensor=2",
        "layout.tensor=2",
        "layout.tensor=2 layout.expert=2 layout.sequence_parallel=true memory.recompute=full",
        "layout.context=2 layout.expert_tensor=2",
        "layout.pipeline=2 layout.schedule=zb-h1",
        "layout.expert=2 layout.zero=3",
        "layout.zero=3 memory.recompute=full",
    ],
)
def test_biases_and_gates_have_the_gradients_of_one_rank(world: World, model: str, layout: str) -> None:
    assert_same(world, deck_of(model, layout), 1e-5)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("model", ["capacity", "sigmoid"])
@pytest.mark.parametrize(
    "layout",
    [
        "layout.expert=2",
        "layout.tensor=2 layout.expert_tensor=2",
        "layout.context=2 layout.expert=2 memory.recompute=full",
        "layout.tensor=2 layout.expert=2 layout.zero=1 layout.sequence_parallel=true",
        "layout.expert=2 layout.zero=3",
    ],
)
def test_other_routers_choose_and_drop_the_same_tokens(world: World, model: str, layout: str) -> None:
    assert_same(world, deck_of(model, layout), 1e-5)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("softmax", ""),
        ("softmax", "layout.expert=2 layout.zero=3"),
        ("softmax", "layout.tensor=2 layout.expert=2 memory.recompute=full"),
        ("softmax", "layout.context=2 layout.expert_tensor=2 layout.context_form=all_to_all"),
        ("capacity", "layout.tensor=2 layout.expert=2 layout.sequence_parallel=true"),
        ("capacity", "layout.context=2"),
        ("sigmoid", "layout.pipeline=2 layout.schedule=zb-h1"),
        ("sigmoid", "layout.tensor=2 layout.expert_tensor=2 layout.sequence_parallel=true"),
    ],
)
def test_padding_counts_on_no_layout(world: World, model: str, layout: str) -> None:
    """In steps with rows of several lengths, and in an evaluation in which a data rank has padding alone."""
    deck = deck_of(model, f"data.pack=false {layout}")
    assert_same(world, deck, 1e-5)
    lone, run = reference(world, deck), trainer(world, deck)
    figures = run.step.evaluate(run.step.batches, 2)
    expected = by_rank_0(world, lambda: lone.step.evaluate(lone.step.batches, 2))
    assert figures == pytest.approx(expected, rel=1e-5)
    assert {"balance_loss", "router_z_loss"} & figures.keys()


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("expert", [1, 2])
def test_experts_may_live_on_a_disk(world: World, mpi_tmp_path: Path, expert: int) -> None:
    """Also those that no other rank has: nothing of them is cut, yet they are read when they are needed."""
    layout = f"layout.expert={expert} layout.zero=3 memory.parameters=disk memory.optimizer=disk"
    assert_same(world, deck_of("softmax", f"{layout} memory.offload_dir={mpi_tmp_path}"), 1e-5)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_choices_that_differ_are_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this file's own comparison: one token that goes elsewhere on one of the ranks."""
    choose = Router.choose

    def other(router: Router, scores: Tensor) -> Tensor:
        chosen = choose(router, scores)
        if len(scores) < 64 and router.layer_context.tensor.rank == 1:
            chosen[0, 0] = next(e for e in range(4) if e not in chosen[0])
        return chosen

    monkeypatch.setattr(Router, "choose", other)
    with pytest.raises(AssertionError):
        assert_same(world, deck_of("softmax", "layout.tensor=2 layout.expert=2"), 1.0)


@pytest.mark.mpi(min_size=2, max_size=4)
def test_in_double_precision_hardly_anything_differs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without updates, which are made in fp32."""
    double = torch.float64
    monkeypatch.setattr(Precision, "of", staticmethod(lambda _: Precision(double, torch.float32, double)))
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr("hpctrain.optim.optimizer.ResidentOptimizer.step", lambda *_: None)
    torch.set_default_dtype(double)
    try:
        for layout in (
            "layout.expert=2",
            "layout.tensor=2 layout.expert_tensor=2",
            "layout.context=2 layout.expert=2 layout.context_form=all_to_all",
            "layout.pipeline=2 layout.schedule=zb-h1",
        ):
            assert_same(world, deck_of("softmax", layout), 1e-12)
    finally:
        torch.set_default_dtype(torch.float32)
