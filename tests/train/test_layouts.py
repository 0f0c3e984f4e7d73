"""Every layout trains the same model: compared with one rank, and with single reductions taken away.

Tests of train/layout_verification.py, engine/build.py, engine/stages/stage.py, engine/registry.py and
parallel/attention/ring.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import hpctrain.train.layout_verification as verify
from hpctrain.comm.group import Group
from hpctrain.comm.work import Work
from hpctrain.comm.world import World
from hpctrain.deck.check import check_deck
from hpctrain.deck.schema import Deck
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.model.part import logits_of
from hpctrain.parallel.tensor import RowLinear
from hpctrain.train.layout_verification import LayoutError, compare, verify_layout
from hpctrain.train.scaled_down_deck import scale_down_family
from tests.engines import LLAMA, by_rank_0, reference, small_deck, trainer

FAMILIES = {"gpt2": (), "llama": LLAMA}
TENSOR = ("layout.tensor=2",)
SEQUENCE = (*TENSOR, "layout.sequence_parallel=true")
AXES = [(tensor, context) for tensor in (1, 2, 4, 8) for context in (1, 2, 4, 8)]


def layouts(ranks: int) -> list[tuple[str, ...]]:
    """All layouts of so many ranks: tensor, context, sequence parallel, context form; data fills the rest."""
    found = []
    for tensor, context in AXES:
        if ranks % (tensor * context):
            continue
        for local in (False, True) if tensor > 1 else (False,):
            found += [
                (
                    f"layout.tensor={tensor}",
                    f"layout.context={context}",
                    f"layout.sequence_parallel={str(local).lower()}",
                    f"layout.context_form={form}",
                )
                for form in (("ring", "all_to_all") if context > 1 else ("ring",))
            ]
    return found


def deck_of(*overrides: str) -> Deck | None:
    """The deck, or None where the layout does not fit its heads."""
    try:
        return small_deck(*overrides)
    except verify.HpctrainError:
        return None


@pytest.mark.sampled(2)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dropout", ["0.0", "0.1"])
def test_first_step_of_every_layout_is_that_of_one_rank(world: World, family: str, dropout: str) -> None:
    if world.size > 2 and (family == "gpt2") != (dropout == "0.1"):
        pytest.skip("two ranks have tried every pair")
    tried = 0
    for layout in layouts(world.size):
        deck = deck_of(*FAMILIES[family], *layout, f"model.dropout={dropout}")
        if deck is None:
            continue
        differences = compare(scale_down_family(deck), world, make_mesh(deck, world))
        tried += 1
        for difference in differences:
            bound = 0.0 if re.fullmatch(r"parameter \S+", difference.name) else 1e-5
            assert difference.error <= bound, (layout, difference)
    assert tried >= 3


def spread(ranks: int, *overrides: str) -> list[tuple[str, ...]]:
    """Four or five of the layouts that fit the deck, of all kinds; of two ranks all there are."""
    chosen = [layout for layout in layouts(ranks) if deck_of(*overrides, *layout)]
    return chosen[:: max(1, len(chosen) // 4)]


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_curves_agree(world: World, family: str) -> None:
    """Those of whole runs, without dropout, are compared in test_trajectory.py."""
    keys = (*FAMILIES[family], "model.dropout=0.1", "batch.global_size=8")
    expected = by_rank_0(world, lambda: [s.loss for s in reference(world, small_deck(*keys)).train(10)])
    for layout in spread(world.size, *FAMILIES[family]):
        measured = trainer(world, small_deck(*keys, *layout)).train(10)
        assert [step.loss for step in measured] == pytest.approx(expected, rel=1e-4), layout
    assert expected[-1] < expected[0]


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_half_precision_within_what_the_format_explains(world: World, compute: str) -> None:
    """Losses differ from fp32's by the format's rounding, of which a handful of sums are made."""
    epsilon = {"bf16": 2.0**-8, "fp16": 2.0**-11}[compute]
    batch = "batch.global_size=8"
    exact = by_rank_0(world, lambda: reference(world, small_deck(batch)).train(5))
    for layout in spread(world.size):
        half = trainer(world, small_deck(batch, *layout, f"precision.compute={compute}")).train(5)
        assert [s.loss for s in half] == pytest.approx([s.loss for s in exact], rel=2 * epsilon), layout
        assert half[0].grad_norm == pytest.approx(exact[0].grad_norm, rel=8 * epsilon), layout


# What a missing reduction would look like: each mutation takes one away.
ON_TWO = pytest.mark.mpi(min_size=2, max_size=2)


@contextmanager
def skipped(monkeypatch: pytest.MonkeyPatch, operation: str, axes: tuple[str, ...]) -> Iterator[None]:
    """Groups over `axes` leave out a reduction: each rank keeps its own part."""
    with monkeypatch.context() as patch:
        if operation == "all_reduce":
            starting = Group.start_all_reduce

            def start_all_reduce(
                self: Group, tensor: torch.Tensor, operation: Any = "sum", blocking: bool = False
            ) -> Work[torch.Tensor]:
                # Over data and context the check itself makes use of blocking ones.
                if self.axes == axes and (axes == ("tensor",) or not blocking):
                    return Work(tensor)
                return starting(self, tensor, operation, blocking)

            patch.setattr(Group, "start_all_reduce", start_all_reduce)
        else:
            blocking_scatter, starting_scatter = Group.reduce_scatter, Group.start_reduce_scatter

            def own(self: Group, tensor: torch.Tensor) -> torch.Tensor:
                return tensor.chunk(self.size)[self.rank].clone()

            def reduce_scatter(self: Group, tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
                return own(self, tensor) if self.axes == axes else blocking_scatter(self, tensor, *rest)

            def start_reduce_scatter(
                self: Group, tensor: torch.Tensor, *rest: Any, **options: Any
            ) -> Work[torch.Tensor]:
                if self.axes == axes:
                    return Work(own(self, tensor))
                return starting_scatter(self, tensor, *rest, **options)

            patch.setattr(Group, "reduce_scatter", reduce_scatter)
            patch.setattr(Group, "start_reduce_scatter", start_reduce_scatter)
        yield


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("operation", "axes", "layout"),
    [
        pytest.param("all_reduce", ("tensor",), TENSOR, marks=ON_TWO, id="tensor"),
        pytest.param("reduce_scatter", ("tensor",), SEQUENCE, marks=ON_TWO, id="sequence parallel"),
        pytest.param("all_reduce", ("tensor",), SEQUENCE, marks=ON_TWO, id="norms under sequence parallel"),
        pytest.param("all_reduce", ("data", "context"), ("layout.context=2",), id="context"),
        pytest.param("all_reduce", ("data", "context"), (), marks=ON_TWO, id="data"),
    ],
)
def test_a_missing_reduction_is_noticed(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    axes: tuple[str, ...],
    layout: tuple[str, ...],
) -> None:
    deck = small_deck(*layout)
    mesh = make_mesh(deck, world)
    assert "agree with one rank" in verify_layout(deck, world, mesh)
    with skipped(monkeypatch, operation, axes), pytest.raises(LayoutError) as caught:
        verify_layout(deck, world, mesh)
    assert "differs from the one-rank run" in str(caught.value)
    if axes == ("data", "context"):
        axis = ("context" if world.size == 2 else "data x context") if layout else "data"
        assert f"a sum over the {axis} axis" in str(caught.value)


@pytest.mark.mpi(min_size=4)
def test_shared_key_value_heads_need_their_sum(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    deck = small_deck(*LLAMA, "layout.tensor=4")
    mesh = make_mesh(deck, world)
    verify_layout(deck, world, mesh)
    monkeypatch.setattr("hpctrain.sharding.synchronize._partial_runs", lambda *_: [])
    with pytest.raises(LayoutError, match=r"attention\.(key|value)"):
        verify_layout(deck, world, mesh)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_norms_under_sequence_parallelism_need_their_sum(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    deck = small_deck("layout.tensor=2", "layout.sequence_parallel=true")
    mesh = make_mesh(deck, world)
    monkeypatch.setattr("hpctrain.sharding.synchronize._partial_runs", lambda *_: [])
    with pytest.raises(
        LayoutError, match=r"final_norm.*a sum over the tensor axis \(2 ranks\) is likely missing"
    ):
        verify_layout(deck, world, mesh)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_doubled_row_bias_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias of a row layer is added once, after the sum; its gradient is not summed over the axis."""
    deck = small_deck("layout.tensor=2")
    mesh = make_mesh(deck, world)
    add = RowLinear._add_bias_gradients

    def each_rank(self: RowLinear, output_gradient: torch.Tensor) -> None:
        add(self, output_gradient * self.layer_context.tensor.size)

    monkeypatch.setattr(RowLinear, "_add_bias_gradients", each_rank)
    expected = (
        r"feed_forward\.down\.bias differs.*a reduction over the tensor axis \(2 ranks\) is likely duplicated"
    )
    with pytest.raises(LayoutError, match=expected):
        verify_layout(deck, world, mesh)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "layout", [("layout.tensor=2",), ("layout.context=2",), ()], ids=["tensor", "context", "data"]
)
def test_norm_counts_every_element_once(world: World, layout: tuple[str, ...]) -> None:
    deck = small_deck(*layout, "layout.sequence_parallel=false")
    run, single = trainer(world, deck), reference(world, deck)
    measured, expected = run.train(1)[0], single.train(1)[0]
    assert measured.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
    whole = torch.cat([g.flatten() for g in single.gradients().values()]).double().norm().item()
    clipped = min(1.0, deck.optimizer.clip / (expected.grad_norm + 1e-6))
    assert expected.grad_norm * clipped == pytest.approx(whole, rel=1e-5)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_padding_of_the_vocabulary_is_never_predicted(world: World) -> None:
    deck = small_deck("layout.tensor=2", "model.tied=false")
    run = trainer(world, deck)
    run.train(3)
    logits = logits_of(run.engine.model, torch.zeros(1, 4, dtype=torch.int64))
    assert logits.shape == (1, 4, 61)
    for name in ("embedding.tokens.weight", "head.weight"):
        rows = run.parameters()[name]
        assert rows.shape[0] == 31
        if run.engine.mesh.coordinate("tensor") == 1:
            assert (rows[30] == 0).all()
            assert (rows[:30] != 0).any()


@pytest.mark.mpi(min_size=2, max_size=2)
def test_tied_embeddings_stay_tied(world: World) -> None:
    run = trainer(world, small_deck("layout.tensor=2"))
    run.train(2)
    model = run.engine.model
    assert model.layers[-1].head.table is model.layers[0].table
    assert "head.weight" not in run.parameters()


@pytest.mark.mpi(min_size=2, max_size=2)
def test_replicas_stay_equal_bit_for_bit(world: World) -> None:
    run = trainer(world, small_deck("model.dropout=0.1"))
    run.train(5)
    for bucket in run.engine.stage.buckets:
        gathered = run.engine.mesh.group("data").all_gather(bucket.values.unsqueeze(0))
        assert (gathered == gathered[0]).all()


def test_the_decks_of_this_file_are_sound() -> None:
    assert check_deck(small_deck()) == []


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_first_steps_of_every_stage_of_zero_are_those_of_one_rank(
    world: World, family: str, recompute: str, stage: int
) -> None:
    deck = small_deck(*FAMILIES[family], f"layout.zero={stage}", f'memory.recompute="{recompute}"')
    for difference in compare(scale_down_family(deck), world, make_mesh(deck, world)):
        bound = 0.0 if re.fullmatch(r"parameter \S+", difference.name) else 1e-5
        assert difference.error <= bound, difference


@pytest.mark.mpi(min_size=4)
def test_deep_pipelines_are_no_rounding_errors(world: World) -> None:
    """Gradients of late queries and keys are tiny: what softmax sees of them nearly cancels."""
    for more in ("layout.tensor=2", "layout.context=2"):
        for seed in (0, 1):
            deck = small_deck(
                "layout.pipeline=2", "layout.schedule=interleaved", "layout.chunks=4", "model.layers=8", more,
                "model.heads=4", f"run.seed={seed}",
            )  # fmt: skip
            assert "agree with one rank" in verify_layout(deck, world, make_mesh(deck, world))


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    "frozen", ['["blocks.3.*"]', '["embedding.*", "blocks.[01].*", "final_norm.*"]', '["blocks.*"]']
)
def test_frozen_parameters_are_those_of_the_deck(world: World, frozen: str) -> None:
    deck = small_deck("model.layers=4", "layout.tensor=2", f"model.frozen={frozen}")
    small = scale_down_family(deck)
    assert small.model.frozen and small.model.layers == 2
    assert "agree with one rank" in verify_layout(deck, world, make_mesh(deck, world))


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("what", ["update", "clip"])
def test_a_wrong_update_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    deck = small_deck("layout.zero=3")
    mesh = make_mesh(deck, world)
    verify_layout(deck, world, mesh)
    if what == "update" and world.rank == 1:
        monkeypatch.setattr(
            "hpctrain.optim.optimizer.ResidentOptimizer.step",
            lambda self, *_: None if self.buckets[0].sharding.zero else pytest.fail("not on one rank"),
        )
    elif what == "clip" and world.rank == 1:
        monkeypatch.setattr("hpctrain.train.step.clip_coefficient", lambda *_: 1.0)
    with pytest.raises(LayoutError, match=r"(in the second step|after both steps) differs"):
        verify_layout(deck, world, mesh)
