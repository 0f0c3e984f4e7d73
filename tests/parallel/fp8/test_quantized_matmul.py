"""The three products of a layer in 8 bits, against numpy, on one rank and on several.

Tests of parallel/fp8/quantized_matmul.py and parallel/fp8/delayed_matmul.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from hpctrain.comm.ledger import Ledger
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.planned import planned_group
from hpctrain.comm.world import World
from hpctrain.costs.layer_bytes.activation_sizes import ActivationSizes
from hpctrain.costs.layer_bytes.matmul_bytes import product_workspace
from hpctrain.parallel.fp8 import formats, quantize
from hpctrain.parallel.fp8 import quantized_matmul as product_module
from hpctrain.parallel.fp8.delayed_matmul import DelayedMatmul, MaximaHistory
from hpctrain.parallel.fp8.formats import E4M3, E5M2, Fp8Format
from hpctrain.parallel.fp8.multiply import multiply_quantized
from hpctrain.parallel.fp8.quantize import QuantizedTensor
from hpctrain.parallel.fp8.quantized_matmul import KINDS, Kind, QuantizedMatmul
from hpctrain.parallel.fp8.recipes import RECIPES, Fp8Settings, ScalingRecipe
from hpctrain.parallel.layer_context import LayerContext, ProductSettings
from hpctrain.parallel.matmul import Matmul
from hpctrain.parallel.shards import Parameter, Shard
from tests.engines import small_deck, trainer
from tests.optim.matrix.test_matrix_optimizer import Held
from tests.parallel.fp8.given import normal, quantized
from tests.parallel.fp8.scales import DELAYED, KEYS

ONE = planned_group(("tensor",), 0, 1, Ledger())
ALONE = LayerContext(tensor=ONE, context=ONE)
M, N, K = 256, 256, 512
CURRENT = {name: recipe for name, recipe in RECIPES.items() if not recipe.delayed}


def in_8_bits(layer_context: LayerContext, recipe: ScalingRecipe, form: Fp8Format = E5M2) -> LayerContext:
    """The same context with products in 8 bits, by a recipe, with this format of gradients."""
    return replace(layer_context, products=ProductSettings(fp8=Fp8Settings(recipe, form)))


def given() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, a matrix and a gradient, larger to their ends, so that no piece has the maxima of another."""
    inputs, weight, gradient = normal(M, K), normal(N, K, seed=1) * 0.02, normal(M, N, seed=2) * 1e-6
    inputs *= torch.linspace(1, 30, K) * torch.linspace(1, 30, M)[:, None]
    weight *= torch.linspace(1, 30, K) * torch.linspace(30, 1, N)[:, None]
    gradient *= torch.linspace(30, 1, N) * torch.linspace(1, 30, M)[:, None]
    return inputs, weight, gradient


def parameter(weight: Tensor, shard: Shard) -> Parameter:
    made = Parameter(shard)
    made.data = shard.take(weight)
    made.gradient = torch.ones(shard.local)
    return made


def passes(product: Matmul, inputs: Tensor, gradient: Tensor) -> list[Tensor]:
    product.add_weight_gradient(gradient, inputs)
    weight = product.weights[0].gradient
    assert weight is not None
    return [product.forward(inputs), product.input_gradient(gradient), weight - 1]


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("recipe", CURRENT.values(), ids=CURRENT)
def test_each_product_is_of_operands_quantized_for_it(recipe: ScalingRecipe, form: Fp8Format) -> None:
    whole = given()
    m, n, k = 40, 72, 160
    inputs, weight, gradient = whole[0][:m, :k], whole[1][:n, :k], whole[2][:m, :n]
    product = QuantizedMatmul(
        [parameter(weight, Shard.replicated("a", (n, k)))], in_8_bits(ALONE, recipe, form)
    )
    found = passes(product, inputs.reshape(10, 4, k), gradient.reshape(10, 4, n))
    x, w, g = (each.double().numpy() for each in (inputs, weight, gradient))
    tokens, weights = recipe.tokens.blocks, recipe.weights.blocks
    expected = (
        quantized(x, E4M3, *tokens) @ quantized(w, E4M3, *weights).T,
        quantized(g, form, *tokens) @ quantized(w.T, E4M3, *weights).T,
        quantized(g.T, form, *tokens) @ quantized(x.T, E4M3, *tokens).T,
    )
    for one, other in zip(found, expected, strict=True):
        apart = np.abs(one.double().numpy().reshape(other.shape) - other).max()
        assert apart <= 1e-6 * np.abs(other).max()


@pytest.mark.parametrize("shape", [(384, 256, 512), (390, 260, 270)], ids=str)
@pytest.mark.parametrize("recipe", CURRENT.values(), ids=CURRENT)
def test_memory_in_passing_is_what_is_told(
    recipe: ScalingRecipe, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where blocks are whole, and where the last ones are smaller; beside scales."""
    for module in (formats, quantize):
        monkeypatch.setattr(module, "ELEMENTS_AT_ONCE", 1 << 15)
    m, n, k = shape
    inputs, weight, gradient = (normal(*each).bfloat16() for each in ((m, k), (n, k), (m, n)))
    made = parameter(weight, Shard.replicated("a", (n, k)))
    made.gradient = torch.ones(n, k)
    product, taken = QuantizedMatmul([made], in_8_bits(ALONE, recipe)), []
    for run in (
        lambda: product.forward(inputs),
        lambda: product.input_gradient(gradient),
        lambda: product.add_weight_gradient(gradient, inputs),
    ):
        with Held() as held:
            result = run()
        taken.append(held.most - (0 if result is None else result.nbytes))
    told = product_workspace(product, m, ActivationSizes(m, m, 1, itemsize=2, gradient_itemsize=4))
    assert 1 <= max(taken) / told <= 1.02


def test_the_first_gradient_is_written_and_others_are_added() -> None:
    inputs, weight, gradient = given()
    own = parameter(weight, Shard.replicated("a", (N, K)))
    product = QuantizedMatmul([own], in_8_bits(ALONE, RECIPES["block"]))
    own.reset_gradient()
    assert own.gradient is not None
    own._gradient.fill_(torch.nan)  # type: ignore[union-attr]
    own.reset_gradient()
    product.add_weight_gradient(gradient, inputs)
    once = own.gradient.clone()
    product.add_weight_gradient(gradient, inputs)
    assert bool(once.isfinite().all()) and torch.equal(own.gradient, 2 * once)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("split", ["columns", "rows", "tokens"])
@pytest.mark.parametrize("recipe", CURRENT.values(), ids=CURRENT)
def test_ranks_scale_parts_as_the_whole(
    world: World, monkeypatch: pytest.MonkeyPatch, recipe: ScalingRecipe, split: str
) -> None:
    inputs, weight, gradient = given()
    operands: list[QuantizedTensor] = []

    def watched(left: QuantizedTensor, right: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        operands.extend((left, right))
        return multiply_quantized(left, right, dtype)

    monkeypatch.setattr(product_module, "multiply_quantized", watched)
    alone = QuantizedMatmul([parameter(weight, Shard.replicated("a", (N, K)))], in_8_bits(ALONE, recipe))
    whole = passes(alone, inputs, gradient)
    of_whole, operands = operands, []
    mesh = Mesh(world, {"context" if split == "tokens" else "tensor": 2})
    both = mesh.group("context", "tensor")
    layer_context = LayerContext(tensor=mesh.group("tensor"), context=mesh.group("context"), micro_batch=both)
    m, n, k = (slice(world.rank * size // 2, (world.rank + 1) * size // 2) for size in (M, N, K))
    everything = slice(None)
    shard = Shard.replicated("a", (N, K))
    if split == "columns":
        m = k = everything
        shard = Shard("a", (N, K), (n.start, 0), (N // 2, K), frozenset({"tensor"}))
    elif split == "rows":
        m = n = everything
        shard = Shard("a", (N, K), (0, k.start), (N, K // 2), frozenset({"tensor"}))
    else:
        n = k = everything
    product = QuantizedMatmul([parameter(weight, shard)], in_8_bits(layer_context, recipe))
    own = passes(product, inputs[m, k].contiguous(), gradient[m, n].contiguous())
    summed = {"columns": 1, "rows": 0, "tokens": 2}[split]
    both.all_reduce(own[summed])
    pieces = (whole[0][m, n], whole[1][m, k], whole[2][n, k])
    for one, other in zip(own, pieces, strict=True):
        assert float((one - other).abs().max()) <= 2e-6 * float(other.abs().max())
    cuts = ((n, m), (k, m), (m, k), (n, k), (m, n), (k, n))
    for part, other, cut in zip(operands, of_whole, cuts, strict=True):
        assert torch.equal(part.dequantized(), other.dequantized()[cut])
        assert torch.equal(scales(part), scales(other)[cut])


def scales(operand: QuantizedTensor) -> Tensor:
    """Of each element."""
    ones = torch.ones(operand.values.shape).to(operand.values.dtype)
    return replace(operand, values=ones).dequantized()


@pytest.mark.mpi(min_size=1, max_size=1)
def test_a_delayed_product_begins_as_stored_and_goes_on_in_8_bits(world: World) -> None:
    stored = small_deck(*KEYS, *DELAYED).with_keys(precision={"compute": "bf16"})
    exact = [step.loss for step in trainer(world.single_rank_world(), stored).train(3)]
    found = [step.loss for step in trainer(world.single_rank_world(), small_deck(*KEYS, *DELAYED)).train(3)]
    assert found[0] == exact[0] and found[1] != exact[1]
    assert found == pytest.approx(exact, rel=2e-2)


@pytest.mark.parametrize("unknown", KINDS)
def test_what_was_zero_so_far_is_multiplied_as_stored(unknown: Kind) -> None:
    """As gradients of layers that begin to be trained, and a matrix that began as zeros: 1e-6 by a scale of
    one would be nothing.
    """
    inputs, weight, gradient = given()
    seen = {"inputs": inputs, "weights": weight, "gradients": gradient}

    def after_a_step(zero: Kind | None) -> DelayedMatmul:
        own = parameter(weight, Shard.replicated("a", (N, K)))
        made = DelayedMatmul([own], in_8_bits(ALONE, RECIPES["delayed"]))
        made.histories = {kind: MaximaHistory(torch.zeros(2)) for kind in KINDS}  # not those of a plan
        own.requires_grad_(True)
        noted = {made._statistic_name(k): (v * (k != zero)).abs().amax()[None] for k, v in seen.items()}
        assert not made.has_all_scales  # and it asks again after the update
        made.after_update(noted)
        assert made.has_all_scales == (zero is None)
        return made

    product, stored = after_a_step(unknown), Matmul([parameter(weight, Shard.replicated("a", (N, K)))], ALONE)
    eight = after_a_step(None)
    found, exact, coarse = (passes(each, inputs, gradient) for each in (product, stored, eight))
    # Forward needs no gradients.
    expected = [coarse[0] if unknown == "gradients" else exact[0], *exact[1:]]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(exact, coarse, strict=True))
    _, kept = product.forward_and_save(inputs, None, None, True)
    assert isinstance(kept, Tensor) and isinstance(product.gather_gradient(gradient, None), Tensor)
    assert product.weight_maxima is None and eight.weight_maxima is not None  # with which to gather in 8 bits
    product.weights[0].requires_grad_(False)
    _, kept = product.forward_and_save(inputs, None, None, True)
    assert isinstance(kept, Tensor) == (unknown != "gradients")
