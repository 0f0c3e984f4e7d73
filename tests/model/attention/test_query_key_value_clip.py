"""Clamp of queries, keys and values: its gradient, also of saved results that are rounded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hpctrain.memory.compress import ActivationFormat, compress, expand
from hpctrain.model.attention.query_key_value_clip import QueryKeyValueClip

BOUND = 0.7  # bf16 rounds it down


def gradients(x: Tensor, form: ActivationFormat) -> tuple[Tensor, Tensor]:
    """Return the results and gradients of the clamp whose saved result is compressed."""

    def unpack(packed: Tensor) -> Tensor:
        return expand(packed, form, x.numel(), x.dtype).view_as(x)

    with saved_tensors_hooks(lambda saved: compress(saved.flatten(), form), unpack):
        result = QueryKeyValueClip(BOUND, form != "exact")(x)
    (gradient,) = torch.autograd.grad(result, x, torch.ones_like(x))
    return result, gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["exact", "bf16", "int8"])
def test_gradients_of_clamped_features_are_zero(form: ActivationFormat, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(16, 2, 64, generator=generator) * BOUND).to(dtype).requires_grad_()
    result, gradient = gradients(x, form)
    assert torch.equal(result, x.clamp(-BOUND, BOUND))
    size = x.detach().abs()
    assert gradient[size >= torch.tensor(BOUND, dtype=dtype)].count_nonzero() == 0
    unchanged = size < (BOUND if form == "exact" else 0.98 * BOUND)
    unchanged &= size < torch.tensor(BOUND, dtype=dtype)
    assert torch.equal(gradient[unchanged], torch.ones_like(gradient[unchanged]))
    assert 0 < unchanged.sum() < x.numel()
