"""Grouped products by expert, against loops and against autograd in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.comm.world import World
from hpctrain.deck.activations import ACTIVATIONS
from hpctrain.deck.sections.experts import ExpertsTable
from hpctrain.parallel.backward.weight_gradients import DeferredGradient, compute_all
from hpctrain.parallel.experts.expert_layer import Experts
from hpctrain.parallel.experts.grouped_products import (
    ROW_UNIT,
    Segments,
    add_grouped_gradient,
    grouped_product,
    row_unit,
)
from hpctrain.parallel.shards import Parameter, Shard
from tests.device_double import on_gpu
from tests.engines import alone
from tests.host_waits import HostWaits

COUNTS = {"even": (3, 3, 3), "empty ones": (0, 5, 0), "all to the last": (0, 0, 7), "none": (0, 0, 0)}


def rows_of(segments: Segments, width: int) -> Tensor:
    """Rows by expert, zero where they fill up."""
    rows = torch.zeros(int(segments.padded_counts.sum()), width)
    rows[segments.positions] = torch.randn(int(segments.counts.sum()), width)
    return rows


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("name", COUNTS)
def test_segments_lie_behind_each_other(name: str, unit: int) -> None:
    segments = Segments(torch.tensor(COUNTS[name]), unit)
    start, places, listed = 0, [], []
    for expert, count in enumerate(COUNTS[name]):
        filled = (count + unit - 1) // unit * unit
        places += range(start, start + count)
        if filled:
            listed.append((expert, slice(start, start + filled)))
        start += filled
        assert int(segments.ends[expert]) == start
    assert segments.positions.tolist() == places
    assert list(segments) == listed


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("name", COUNTS)
def test_each_row_meets_its_own_matrix(name: str, unit: int) -> None:
    torch.manual_seed(0)
    segments = Segments(torch.tensor(COUNTS[name]), unit)
    rows, matrices = rows_of(segments, 6), torch.randn(3, 5, 6)
    found = grouped_product(rows, matrices, segments)[segments.positions]
    owners = torch.arange(3).repeat_interleave(segments.counts)
    expected = torch.einsum("mk,mnk->mn", rows[segments.positions].double(), matrices[owners].double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", COUNTS)
def test_weight_gradients_are_sums_of_outer_products(name: str, dtype: torch.dtype, stale: bool) -> None:
    """Added to what is there, or in its place where that is stale: there, experts without rows get zero."""
    torch.manual_seed(0)
    segments = Segments(torch.tensor(COUNTS[name]), 1)
    left, right = rows_of(segments, 5).to(dtype), rows_of(segments, 6).to(dtype)
    weight = Parameter(Shard.replicated("w", (3, 5, 6)))
    before = torch.randn(3, 5, 6)
    weight.gradient = before.clone()
    told: list[Parameter] = []
    weight.on_gradient_added = told.append
    if stale:
        weight.reset_gradient()
    add_grouped_gradient(left, right, weight, segments)
    expected = torch.zeros(3, 5, 6) if stale else before.clone()
    start = 0
    for expert, count in enumerate(COUNTS[name]):
        for row in range(start, start + count):
            expected[expert] += torch.outer(left[row].float(), right[row].float())
        start += count
    allowed = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(weight.gradient, expected, rtol=allowed, atol=allowed)
    assert told == [weight]


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("name", COUNTS)
def test_kernels_of_gpus_and_experts_without_rows(
    name: str, stale: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gets no empty product, and leaves the memory of an expert without rows as it was: NaN."""
    torch.manual_seed(0)
    counts, multiply = torch.tensor(COUNTS[name]), functional.grouped_mm

    def grouped_mm(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        assert left.numel() and right.numel()
        product = multiply(
            *(each.as_subclass(Tensor) for each in (left, right)), offs=offs.as_subclass(Tensor)
        )
        if right.dim() == 2:
            product[counts == 0] = torch.nan
        return product

    monkeypatch.setattr(functional, "grouped_mm", grouped_mm)
    segments, host = Segments(on_gpu(counts), 1), Segments(counts, 1)
    left, right, matrices = rows_of(host, 8), rows_of(host, 16), torch.randn(3, 8, 16)
    with HostWaits() as found:
        outputs = grouped_product(on_gpu(right), on_gpu(matrices), segments)
    assert not found.calls
    assert torch.equal(outputs.as_subclass(Tensor), grouped_product(right, matrices, host))
    gradients = []
    for rows, put in ((host, Tensor.clone), (segments, on_gpu)):
        weight = Parameter(Shard.replicated("w", (3, 8, 16)))
        weight.gradient = torch.ones(3, 8, 16)
        weight.on_gradient_added = lambda _: None
        if stale:
            weight.reset_gradient()
        add_grouped_gradient(put(left), put(right), weight, rows)
        assert weight.gradient is not None
        gradients.append(weight.gradient)
    torch.testing.assert_close(*gradients)
    assert torch.all(gradients[1][counts == 0] == (0.0 if stale else 1.0))


def test_a_frozen_matrix_takes_no_gradient() -> None:
    weight = Parameter(Shard.replicated("w", (1, 2, 2)))
    weight.requires_grad_(False)
    add_grouped_gradient(torch.ones(1, 2), torch.ones(1, 2), weight, Segments(torch.tensor([1]), 1))
    assert weight.gradient is None


def test_16_bit_rows_are_filled_up_on_cpus_alone() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert row_unit(torch.bfloat16, cpu) == row_unit(torch.float16, cpu) == ROW_UNIT
    assert row_unit(torch.float32, cpu) == row_unit(torch.bfloat16, gpu) == 1


@pytest.mark.parametrize("deferred", [False, True])
def test_gradients_are_those_of_autograd(world: World, deferred: bool) -> None:
    """At once, put off by the caller, or held back in the queue."""
    torch.manual_seed(1)
    layer_context = alone(world)
    settings = ExpertsTable(count=3, per_token=1, mlp=8, balance_loss=0.0)
    experts = Experts("experts", settings, 6, layer_context, ACTIVATIONS["swiglu"], False)
    weights = torch.randn(3, 2, 8, 6), torch.randn(3, 6, 8)
    for parameter, weight in zip(experts.deferred_parameters, weights, strict=True):
        parameter.data = weight.clone()
        parameter.gradient = torch.zeros_like(weight)
    segments = Segments(torch.tensor([2, 0, 4]), 1)
    rows = torch.randn(6, 6).requires_grad_()
    gradient = torch.randn(6, 6)
    later: list[DeferredGradient] = []
    queue = layer_context.weight_gradients
    queue.deferring = deferred
    experts(rows, segments, later).backward(gradient)
    queue.deferring = False
    assert all(not parameter.gradient.any() for parameter in experts.deferred_parameters)
    assert (len(queue), len(later)) == ((1, 0) if deferred else (0, 1))
    compute_all([*queue.take(), *later])

    leaves = [weight.double().requires_grad_() for weight in weights]
    x = rows.detach().double().requires_grad_()
    owners = torch.arange(3).repeat_interleave(segments.counts)
    gate, up = torch.einsum("mk,mznk->zmn", x, leaves[0][owners])
    torch.einsum("mk,mnk->mn", functional.silu(gate) * up, leaves[1][owners]).backward(gradient.double())
    found = [rows.grad, *(parameter.gradient for parameter in experts.deferred_parameters)]
    for here, leaf in zip(found, (x, *leaves), strict=True):
        torch.testing.assert_close(here.double(), leaf.grad, rtol=1e-4, atol=1e-4)
