"""Rows that travel to their experts and back, on any ranks, against a plain loop over all of them on one.

Tests of parallel/experts/dispatch.py and parallel/experts/expert_layer.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.deck.activations import ACTIVATIONS
from hpctrain.deck.sections.experts import ExpertsTable
from hpctrain.parallel.experts.dispatch import Dispatch
from hpctrain.parallel.experts.expert_layer import Experts
from hpctrain.parallel.experts.grouped_products import row_unit
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.shards import Parameter

EXPERTS, CHOSEN, HIDDEN, INNER, ROWS = 8, 2, 12, 16, 11


@dataclass
class Routed:
    """What every rank's rows are, and where they go: [ranks, rows, ...]."""

    rows: Tensor
    choices: Tensor
    weights: Tensor
    gradient: Tensor
    accepted: Tensor | None = None


def routed(ranks: int, rows: int, choose: Callable[[int, int], Tensor]) -> Routed:
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(ranks, rows, n, generator=generator) for n in (HIDDEN, CHOSEN, HIDDEN)]
    torch.manual_seed(4)
    choices = torch.stack([choose(rank, rows) for rank in range(ranks)])
    return Routed(values[0], choices, values[1].abs(), values[2])


def at_random(_: int, rows: int) -> Tensor:
    return torch.rand(rows, EXPERTS).argsort(1)[:, :CHOSEN]


def same(*experts: int) -> Callable[[int, int], Tensor]:
    return lambda _, rows: torch.tensor([experts]).expand(rows, -1).clone()


CASES: dict[str, Callable[[int], Routed]] = {
    "at random": lambda ranks: routed(ranks, ROWS, at_random),
    "all to the first, none to other ranks": lambda ranks: routed(ranks, ROWS, same(1, 0)),
    "none to the first rank": lambda ranks: routed(ranks, ROWS, same(EXPERTS - 1, EXPERTS - 2)),
    "one row": lambda ranks: routed(ranks, 1, at_random),
    "none of some ranks' rows": lambda ranks: routed(ranks, ROWS, lambda r, n: same(r % 4, 4 + r % 4)(r, n)),
}


def some_kept(ranks: int) -> Routed:
    """Drops of either choice, both choices of a row, and all of one expert's rows."""
    case = routed(ranks, ROWS, at_random)
    case.accepted = torch.rand(case.choices.shape) < 0.6
    case.accepted[:, 2] = False
    case.accepted[case.choices == 5] = False
    return case


def none_kept(ranks: int) -> Routed:
    case = routed(ranks, ROWS, at_random)
    case.accepted = torch.zeros_like(case.choices, dtype=torch.bool)
    return case


CASES |= {"some kept": some_kept, "none kept": none_kept}


def layouts(world: World) -> list[tuple[int, int]]:
    """Ranks over which experts are spread, and that split each of them."""
    return {1: [(1, 1)], 2: [(2, 1), (1, 2)], 4: [(4, 1), (2, 2), (1, 4)]}.get(world.size, [])


def layer_context_of(world: World, expert: int, expert_tensor: int) -> LayerContext:
    mesh = Mesh(world, {"data": world.size, "expert": expert, "expert_tensor": expert_tensor})
    own = mesh.group("tensor"), mesh.group("context")
    return LayerContext(*own, expert=mesh.group("expert"), expert_tensor=mesh.group("expert_tensor"))


def matrices() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    gate_up = torch.randn(EXPERTS, 2, INNER, HIDDEN, generator=generator) / 3
    return {"gate_up": gate_up, "down": torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) / 4}


def experts_of(layer_context: LayerContext, dtype: torch.dtype) -> Experts:
    settings = ExpertsTable(count=EXPERTS, per_token=CHOSEN, mlp=INNER, balance_loss=0.0)
    experts = Experts("experts", settings, HIDDEN, layer_context, ACTIVATIONS["swiglu"], False)
    for name, whole in matrices().items():
        parameter: Parameter = getattr(experts, name)
        parameter.data = parameter.shard.take(whole).to(dtype)
        parameter.gradient = torch.zeros(parameter.shard.local)
    return experts


def by_loop(case: Routed, dtype: torch.dtype) -> dict[str, Tensor]:
    """Results and gradients in fp64, token by token; what they start from is rounded as on ranks."""
    leaves = {"rows": case.rows, "weights": case.weights, **matrices()}
    leaves = {
        name: (tensor if name == "weights" else tensor.to(dtype)).double().requires_grad_()
        for name, tensor in leaves.items()
    }
    results = []
    for rank, choices in enumerate(case.choices):
        for row, of_row in enumerate(choices.tolist()):
            x, result = leaves["rows"][rank, row], torch.zeros(HIDDEN, dtype=torch.float64)
            for slot, expert in enumerate(of_row):
                if case.accepted is None or case.accepted[rank, row, slot]:
                    gate, up = leaves["gate_up"][expert]
                    inner = torch.nn.functional.silu(gate @ x) * (up @ x)
                    result = result + leaves["weights"][rank, row, slot] * (leaves["down"][expert] @ inner)
            results.append(result)
    output = torch.stack(results).view_as(case.rows)
    (output * case.gradient.to(dtype)).sum().backward() if output.requires_grad else None
    found = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    return {"output": output.detach(), **found}


def by_ranks(
    world: World, layer_context: LayerContext, case: Routed, dtype: torch.dtype
) -> dict[str, Tensor]:
    experts = experts_of(layer_context, dtype)
    rows = case.rows[world.rank].to(dtype).requires_grad_()
    weights = case.weights[world.rank].clone().requires_grad_()
    kept = None if case.accepted is None else case.accepted[world.rank]
    unit = row_unit(dtype, rows.device)
    dispatch = Dispatch(
        case.choices[world.rank], kept, EXPERTS, layer_context.expert, layer_context.expert_tensor, unit
    )
    arrived = dispatch.receive(dispatch.send(rows))
    assert len(arrived) == int(dispatch.segments.padded_counts.sum())
    output = dispatch.combine(
        dispatch.send_back(experts(arrived, dispatch.segments, dispatch.deferred_work)), weights
    )
    output.backward(case.gradient[world.rank].to(dtype))
    found: dict[str, Any] = {"output": output.detach(), "rows": rows.grad, "weights": weights.grad}
    return found | {name: getattr(experts, name).gradient for name in matrices()}


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_rows_come_back_as_from_a_plain_loop(world: World, name: str, dtype: torch.dtype) -> None:
    for layout in layouts(world):
        layer_context = layer_context_of(world, *layout)
        case = CASES[name](world.size)
        expected, found = by_loop(case, dtype), by_ranks(world, layer_context, case, dtype)
        shards = experts_of(layer_context, dtype)
        for key, whole in expected.items():
            here = getattr(shards, key).shard.take(whole) if key in matrices() else whole[world.rank]
            allowed = 2e-5 if dtype == torch.float32 else 4e-2
            scale = max(1.0, float(here.abs().max()) if here.numel() else 0.0)
            difference = (found[key].double() - here).abs().max() if here.numel() else 0
            assert difference <= allowed * scale, (layout, key, difference)


@pytest.mark.mpi
def test_the_same_rows_give_the_same_bits(world: World) -> None:
    for layout in layouts(world):
        case = CASES["at random"](world.size)
        layer_context = layer_context_of(world, *layout)
        once, again = (by_ranks(world, layer_context, case, torch.float32) for _ in range(2))
        assert all(torch.equal(once[name], again[name]) for name in once), layout


@pytest.mark.mpi(min_size=2)
def test_the_sizes_of_exchanges_are_those_of_the_choices(world: World) -> None:
    """A rank sends to each expert rank the choices of its experts, and takes what others have for its own."""
    layer_context = layer_context_of(world, world.size, 1)
    case = some_kept(world.size)
    assert case.accepted is not None
    dispatch = Dispatch(
        case.choices[world.rank],
        case.accepted[world.rank],
        EXPERTS,
        layer_context.expert,
        layer_context.expert_tensor,
        1,
    )
    of_rank = EXPERTS // world.size
    homes = case.choices // of_rank
    for rank in range(world.size):
        there = (homes[world.rank] == rank) & case.accepted[world.rank]
        assert dispatch.send_sizes[rank] == int(there.sum())
        assert dispatch.receive_sizes[rank] == int(((homes[rank] == world.rank) & case.accepted[rank]).sum())
    own = case.choices[case.accepted & (homes == world.rank)] - world.rank * of_rank
    assert torch.equal(dispatch.segments.counts, torch.bincount(own, minlength=of_rank))
