"""Norms of queries and keys: every layout is one rank, memory is as planned, gradients are autograd's."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.model.attention.query_key_norm import QueryKeyNorm
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.shards import Partition
from hpctrain.plan.memory_plan import plan_memory
from hpctrain.train.layout_verification import LayoutError, compare, verify_layout
from hpctrain.train.scaled_down_deck import scale_down_family
from tests.engines import LLAMA, alone, small_deck, trainer

NORMS = {
    kind: (*LLAMA, f"model.query_key_norm={kind}", "model.head_size=6", "batch.global_size=4")
    for kind in ("head", "all", "layer_per_head")
}
NORMS["head"] += ("model.attention_bias=query_key_value",)
LAYOUTS: dict[int, list[tuple[str, ...]]] = {
    2: [
        ("layout.tensor=2",),
        ("layout.tensor=2", "layout.sequence_parallel=true"),
        ("layout.context=2",),
        ("layout.context=2", "layout.context_form=all_to_all"),
        ("layout.zero=3", "memory.recompute=full"),
        ("layout.pipeline=2", "layout.schedule=zb-h1"),
    ],
    4: [
        ("layout.tensor=4",),
        ("layout.tensor=4", "layout.sequence_parallel=true", "memory.recompute=selective"),
        ("layout.tensor=2", "layout.context=2", "layout.sequence_parallel=true"),
        ("layout.tensor=2", "layout.zero=2"),
    ],
}


@pytest.mark.parametrize("kind", NORMS)
def test_gradients_are_those_of_autograd(kind: str, world: World) -> None:
    torch.manual_seed(0)
    shape = ModelShape(
        family="llama", layers=1, hidden=10, heads=4, key_value_heads=2, mlp=8, vocabulary=7, sequence=4,
        tied=False, head_size=6, query_key_norm=kind, norm_epsilon=0.1,
    )  # fmt: skip
    layer_context = alone(world)
    rows = Partition.split(24, layer_context.tensor, 6), Partition.split(12, layer_context.tensor, 6)
    norm = QueryKeyNorm("attention", shape, layer_context, *rows)
    inputs = [torch.randn(3, 2, heads, 6, requires_grad=True) for heads in (4, 2)]
    for weight in (norm.query_weight, norm.key_weight):
        weight.data = torch.randn(weight.shape)
    found = norm(*inputs)

    def expected(x: Tensor, weight: Tensor) -> Tensor:
        if kind == "layer_per_head":
            return functional.layer_norm(x, x.shape[-1:], None, None, 0.1) * weight.view(-1, 6)
        flat = x.flatten(2) if kind == "all" else x
        return functional.rms_norm(flat, flat.shape[-1:], weight, 0.1).view(x.shape)

    weights = [norm.query_weight, norm.key_weight]
    wanted = [expected(x, weight) for x, weight in zip(inputs, weights, strict=True)]
    directions = [torch.randn_like(x) for x in inputs]
    torch.testing.assert_close(list(found), wanted)
    of_found = torch.autograd.grad(found, [*inputs, *weights], directions)
    torch.testing.assert_close(of_found, torch.autograd.grad(wanted, [*inputs, *weights], directions))


@pytest.mark.mpi(min_size=2, max_size=4)
@pytest.mark.parametrize("kind", NORMS)
def test_first_steps_are_those_of_one_rank(world: World, kind: str) -> None:
    for layout in LAYOUTS.get(world.size, []):
        deck = small_deck(*NORMS[kind], *layout)
        narrow = scale_down_family(deck)
        wide = narrow.with_keys(model={"head_size": 12})
        for small in (narrow, wide):
            differences = compare(small, world, make_mesh(deck, world))
            assert sum("_norm.weight" in each.name for each in differences if "query" in each.name) >= 6
            for difference in differences:
                bound = 0.0 if re.fullmatch(r"parameter \S+", difference.name) else 1e-5
                assert difference.error <= bound, (layout, difference)


@pytest.mark.mpi(min_size=2, max_size=4)
def test_a_missing_sum_over_all_heads_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    deck = small_deck(*NORMS["all"], f"layout.tensor={world.size}")
    mesh = make_mesh(deck, world)
    verify_layout(deck, world, mesh)
    blocking = Group.all_reduce

    def of_own_heads(self: Group, x: Tensor, operation: str = "sum") -> Tensor:
        own = self.axes == ("tensor",) and x.dim() == 4
        return x.mul_(self.size) if own else blocking(self, x, operation)

    monkeypatch.setattr(Group, "all_reduce", of_own_heads)
    with pytest.raises(LayoutError):
        verify_layout(deck, world, mesh)


@pytest.mark.sampled(2)
@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_activations_are_those_that_are_kept(world: World, kind: str, recompute: str) -> None:
    layouts = [layout for layout in LAYOUTS.get(world.size, [()]) if "layout.zero=3" not in layout]
    for layout in layouts:
        for compute in ("fp32",) if recompute == "full" else ("fp32", "bf16"):
            more = (f"memory.recompute={recompute}", f"precision.compute={compute}", "batch.global_size=16")
            deck = small_deck(*NORMS[kind], *layout, *more)
            training = trainer(world, deck)
            planned = plan_memory(deck, world.size, 61, schedule=training.engine.schedule)
            training.train(1)
            here = planned.stages[training.engine.mesh.coordinate("pipeline")].memory
            training.engine.close()
            assert training.activations.bytes == pytest.approx(here.activation, rel=0.01), (layout, compute)
