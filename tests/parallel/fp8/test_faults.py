"""Faults that make quantized runs diverge after a thousand steps, put in: the comparisons of the other tests
find each of them in a few.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.parallel.fp8 import quantized_matmul as product_module
from hpctrain.parallel.fp8.delayed_matmul import DelayedMatmul
from hpctrain.parallel.fp8.formats import E4M3, E5M2, reducible_maximum
from hpctrain.parallel.fp8.multiply import multiply_quantized
from hpctrain.parallel.fp8.quantize import QuantizedTensor
from hpctrain.parallel.fp8.quantized_matmul import Dims, Kind, QuantizedMatmul
from hpctrain.parallel.fp8.recipes import RECIPES
from hpctrain.parallel.shards import Shard
from hpctrain.parallel.step_statistics import StepStatistics
from tests.parallel.fp8.given import normal, quantized
from tests.parallel.fp8.scales import alike, maxima_of, scales_of
from tests.parallel.fp8.test_layouts import STILL
from tests.parallel.fp8.test_quantized_matmul import ALONE, CURRENT, in_8_bits, parameter, passes

RECOMPUTE = ("memory.recompute=full",)


@pytest.fixture
def scales_by_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass of a micro-batch remembers its own maximum, at once."""
    forward = DelayedMatmul.forward

    def remembering(self: DelayedMatmul, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        output = forward(self, inputs, bias)
        self.histories["inputs"].append(reducible_maximum(inputs.abs().amax()))
        self.histories["weights"].append(reducible_maximum(self.weight().abs().amax()))
        self._scales_exist.clear()
        return output

    monkeypatch.setattr(DelayedMatmul, "forward", remembering)


@pytest.fixture
def maxima_as_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is noted adds up, so that what is computed again counts twice."""

    def adding(self: DelayedMatmul, kind: Kind, values: Tensor) -> None:
        noted, name = self.layer_context.statistics, self._statistic_name(kind)
        before = next((v for (n, *_), v in noted._recorded["max"].items() if n == name), torch.zeros(1))
        noted.record_max(name, before + reducible_maximum(values.abs().amax().reshape(1)))

    monkeypatch.setattr(DelayedMatmul, "_record", adding)


@pytest.fixture
def maxima_of_this_rank(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    """Ranks do not agree on maxima."""
    agree, alone = StepStatistics.reduce, world.single_rank_world().everyone

    def by_itself(self: StepStatistics, everyone: Group) -> dict[str, Tensor]:
        return agree(self, alone)

    monkeypatch.setattr(StepStatistics, "reduce", by_itself)


@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.usefixtures("scales_by_micro_batch")
def test_scales_that_change_with_micro_batches_are_found_by_their_size(world: World) -> None:
    assert not alike(maxima_of(world, *STILL, "batch.micro_size=4"), maxima_of(world, *STILL))


@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.parametrize("fault", ["scales_by_micro_batch", "maxima_as_sums"])
def test_what_is_remembered_or_noted_twice_is_found_by_recomputation(
    world: World, fault: str, request: pytest.FixtureRequest
) -> None:
    assert alike(maxima_of(world, *RECOMPUTE), maxima_of(world))
    request.getfixturevalue(fault)
    assert not alike(maxima_of(world, *RECOMPUTE), maxima_of(world))


@pytest.mark.mpi(min_size=2, max_size=2)
def test_maxima_of_each_rank_alone_are_found_by_any_data_rank(
    world: World, request: pytest.FixtureRequest
) -> None:
    expected = maxima_of(world.single_rank_world())
    assert alike(maxima_of(world), expected)
    request.getfixturevalue("maxima_of_this_rank")
    found = world.everyone.all_gather_object(alike(maxima_of(world), expected))
    assert not all(found)


def spread() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, a matrix and a gradient in which neither rows nor columns are of one magnitude: what is normal
    beside its own dim's largest is less than the least number beside the other one's.
    """
    m, n, k = 96, 64, 160
    return (
        normal(m, k) * _magnitudes(m, k, 18),
        normal(n, k, seed=1) * _magnitudes(n, k, 18),
        normal(m, n, seed=2) * _magnitudes(m, n, 36),
    )


def _magnitudes(rows: int, columns: int, most: int) -> Tensor:
    """Powers of two, each of a row's times a column's, of which one is up to 2^most times another one."""
    below, beside = (
        torch.exp2(
            -torch.randint(0, most + 1, (size,), generator=torch.Generator().manual_seed(size)).float()
        )
        for size in (rows, columns)
    )
    return below[:, None] * beside


def operands_are_of_high_precision(name: str, watch: Callable[[object, str, object], None]) -> bool:
    """Whether all six operands of a layer's products are what numpy quantizes of the given numbers."""
    recipe, whole, operands = RECIPES[name], spread(), []

    def watched(left: QuantizedTensor, right: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        operands.extend((left.dequantized(), right.dequantized()))
        return multiply_quantized(left, right, dtype)

    watch(product_module, "multiply_quantized", watched)
    inputs, weight, gradient = whole
    shape = (weight.shape[0], weight.shape[1])
    passes(
        QuantizedMatmul([parameter(weight, Shard.replicated("a", shape))], in_8_bits(ALONE, recipe)),
        inputs,
        gradient,
    )
    x, w, g = (each.double().numpy() for each in whole)
    tokens, weights = recipe.tokens.blocks, recipe.weights.blocks
    expected = (
        quantized(g.T, E5M2, *tokens),
        quantized(x.T, E4M3, *tokens),
        quantized(x, E4M3, *tokens),
        quantized(w, E4M3, *weights),
        quantized(g, E5M2, *tokens),
        quantized(w.T, E4M3, *weights),
    )
    assert len(operands) == len(expected)
    return all(np.array_equal(one.numpy(), other) for one, other in zip(operands, expected, strict=True))


@pytest.mark.parametrize("name", CURRENT)
def test_operands_are_quantized_from_high_precision(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert operands_are_of_high_precision(name, monkeypatch.setattr)


@pytest.mark.parametrize("kind", ["inputs", "weights", "gradients"])
@pytest.mark.parametrize("name", ["row", "block", "mx"])
def test_a_transposed_operand_made_of_the_quantized_one_is_found(
    name: str, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "block" and kind == "weights":
        pytest.skip("blocks of 128 x 128 are the same transposed: quantizing twice is quantizing once")
    quantize = QuantizedMatmul._quantize

    def twice(
        self: QuantizedMatmul,
        of: Kind,
        matrix: Tensor,
        dims: Dims,
        in_pieces: bool = False,
        transposed: bool = False,
    ) -> QuantizedTensor:
        if of == kind and transposed:
            matrix = quantize(self, of, matrix, dims).dequantized()
        elif of == kind and dims == ("inputs", "outputs"):
            matrix = quantize(self, of, matrix.t(), (dims[1], dims[0])).dequantized().t()
        return quantize(self, of, matrix, dims, in_pieces, transposed)

    monkeypatch.setattr(QuantizedMatmul, "_quantize", twice)
    assert not operands_are_of_high_precision(name, monkeypatch.setattr)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("layout", ["layout.tensor=2", "layout.context=2"])
def test_a_maximum_over_no_group_or_a_wrong_one_is_found_by_parts(
    world: World, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ("precision.fp8=tensor", *STILL)
    expected = scales_of(world.single_rank_world(), *keys)
    monkeypatch.setattr(QuantizedMatmul, "_holders", lambda *_: None)
    assert scales_of(world, *keys, layout) != expected
    other = "context" if "tensor" in layout else "tensor"
    monkeypatch.setattr(QuantizedMatmul, "_holders", lambda self, *_: getattr(self.layer_context, other))
    assert scales_of(world, *keys, layout) != expected
