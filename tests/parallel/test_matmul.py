"""Products in pieces and by blocks are the products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpctrain.comm.ledger import Ledger
from hpctrain.comm.planned import planned_group
from hpctrain.comm.world import World
from hpctrain.parallel.fp8 import matmul_choice
from hpctrain.parallel.kernels import matmul_kernels as kernels
from hpctrain.parallel.layer_context import LayerContext
from hpctrain.parallel.matmul import Matmul
from hpctrain.parallel.shards import Parameter, Shard
from tests.engines import small_deck, trainer

VOCABULARY, HIDDEN = 37, 8
ONE = planned_group(("tensor",), 0, 1, Ledger())
LAYER_CONTEXT = LayerContext(tensor=ONE, context=ONE)


@pytest.mark.parametrize("first", [True, False])
def test_products_in_pieces_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    of_output, inputs = torch.randn(6, 5, 40).bfloat16(), torch.randn(6, 5, 16).bfloat16()
    found = []
    for most in (1 << 20, 7 * 16):
        monkeypatch.setattr(kernels, "PRODUCT_ELEMENTS", most)
        weight = Parameter(Shard.replicated("a.weight", (40, 16)))
        weight.gradient = torch.full((40, 16), torch.nan if first else 2.0)
        if first:
            weight.reset_gradient()
        Matmul([weight], LAYER_CONTEXT).add_weight_gradient(of_output, inputs)
        found.append(weight.gradient)
    exact = of_output.flatten(0, 1).float().t() @ inputs.flatten(0, 1).float() + (0.0 if first else 2.0)
    torch.testing.assert_close(found[0], exact, rtol=1e-2, atol=1e-1)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("block", [1, 7, VOCABULARY])
def test_products_by_blocks_are_the_products(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(kernels, "BLOCK_ROWS", block)
    hidden, table = torch.randn(5, HIDDEN), Parameter(Shard.replicated("table", (VOCABULARY, HIDDEN)))
    table.data = torch.randn(VOCABULARY, HIDDEN)
    torch.testing.assert_close(Matmul([table], LAYER_CONTEXT).logits(hidden), hidden @ table.detach().t())
    table.data = table.data.bfloat16()
    half = Matmul([table], LAYER_CONTEXT).logits(hidden.bfloat16())
    torch.testing.assert_close(half, hidden.bfloat16() @ table.detach().t())


class Rounded(Matmul):
    """Multiplies what is rounded to 8 bits, and remembers the largest input of its matrix."""

    largest = 0.0

    def forward(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().forward(self._rounded(inputs), bias)

    def logits(self, inputs: Tensor) -> Tensor:
        return super().logits(self._rounded(inputs))

    def _rounded(self, inputs: Tensor) -> Tensor:
        self.largest = max(self.largest, float(inputs.abs().max()))
        return inputs.to(torch.float8_e4m3fn).to(inputs.dtype)


def test_another_format_is_one_class_and_one_choice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    deck = small_deck("precision.compute=bf16")
    exact = [step.loss for step in trainer(world.single_rank_world(), deck).train(2)]
    monkeypatch.setattr(matmul_choice, "Matmul", Rounded)
    training = trainer(world.single_rank_world(), deck)
    rounded = [step.loss for step in training.train(2)]
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=2e-2)
    model = training.engine.model
    products = [layer.product for layer in model.modules() if hasattr(layer, "product")]
    assert len(products) == 2 * 4 + 1
    assert all(type(each) is Rounded and each.largest > 0 for each in products)
