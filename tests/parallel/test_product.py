"""Products in pieces and by blocks are the products."""

from __future__ import annotations

import pytest
import torch

from hpctrain.parallel import product
from hpctrain.parallel.product import Product
from hpctrain.parallel.shard import Parameter, Shard

VOCABULARY, HIDDEN = 37, 8


@pytest.mark.parametrize("first", [True, False])
def test_products_in_pieces_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    of_output, inputs = torch.randn(6, 5, 40).bfloat16(), torch.randn(6, 5, 16).bfloat16()
    found = []
    for most in (1 << 20, 7 * 16):
        monkeypatch.setattr(product, "PRODUCT_ELEMENTS", most)
        weight = Parameter(Shard.whole("a.weight", (40, 16)))
        weight.gradient = torch.full((40, 16), torch.nan if first else 2.0)
        if first:
            weight.forget_gradient()
        Product([weight]).add_weight_gradient(of_output, inputs)
        found.append(weight.gradient)
    exact = of_output.flatten(0, 1).float().t() @ inputs.flatten(0, 1).float() + (0.0 if first else 2.0)
    torch.testing.assert_close(found[0], exact, rtol=1e-2, atol=1e-1)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("block", [1, 7, VOCABULARY])
def test_products_by_blocks_are_the_products(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(product, "BLOCK_ROWS", block)
    hidden, table = torch.randn(5, HIDDEN), Parameter(Shard.whole("table", (VOCABULARY, HIDDEN)))
    table.data = torch.randn(VOCABULARY, HIDDEN)
    torch.testing.assert_close(Product([table]).logits(hidden), hidden @ table.detach().t())
    table.data = table.data.bfloat16()
    half = Product([table]).logits(hidden.bfloat16())
    torch.testing.assert_close(half, hidden.bfloat16() @ table.detach().t())
