"""Blocks of attention against torch's own attention and its autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.parallel import attention_block
from hpctrain.parallel.attention_block import attend, attend_backward, merge


@pytest.fixture(params=["fused", "plain"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of computing a block, each on the CPU."""
    if request.param == "plain":
        monkeypatch.setattr(attention_block, "_fused", attention_block._plain)
        monkeypatch.setattr(attention_block, "_fused_backward", attention_block._plain_backward)
    return str(request.param)


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(12, 2, 6, 16), torch.randn(12, 2, 2, 16), torch.randn(12, 2, 2, 16)


def expected(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    heads = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    output = functional.scaled_dot_product_attention(*heads, is_causal=causal, enable_gqa=True)
    return output.permute(2, 0, 1, 3)


@pytest.mark.parametrize("causal", [False, True])
def test_output_and_gradients_of_one_block(kernel: str, causal: bool) -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    reference = expected(q, k, v, causal)
    gradient = torch.randn_like(reference)
    reference.backward(gradient)
    output, log_sum = attend(q.detach(), k.detach(), v.detach(), causal)
    torch.testing.assert_close(output, reference.detach(), rtol=1e-5, atol=1e-6)
    found = attend_backward(gradient, q.detach(), k.detach(), v.detach(), output, log_sum, causal)
    for mine, parameter in zip(found, (q, k, v), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-4, atol=1e-6)


def test_two_blocks_merge_to_the_whole(kernel: str) -> None:
    q, k, v = tensors()
    reference = expected(q, k, v, False)
    first, log_first = attend(q, k[:5], v[:5], False)
    second, log_second = attend(q, k[5:], v[5:], False)
    output, log_sum = first.clone(), log_first.contiguous()
    merge(output, log_sum, second, log_second)
    torch.testing.assert_close(output, reference, rtol=1e-5, atol=1e-6)
    # The backward pass of a part, given the whole's output, is the whole's gradient for that part.
    k.requires_grad_()
    gradient = torch.randn_like(output)
    expected(q, k, v, False).backward(gradient)
    part = attend_backward(gradient, q, k.detach()[5:], v[5:], output, log_sum, False)
    assert k.grad is not None
    torch.testing.assert_close(part[1], k.grad[5:], rtol=1e-4, atol=1e-6)
