"""Blocks of attention against torch's own attention and its autograd."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hpctrain.parallel.kernels import attention_block
from hpctrain.parallel.kernels.attention_block import attend, attend_backward, merge

SCALE = 16**-0.5
"""Factor of the products of queries and keys, which torch's attention has for heads of 16 features."""


class WrittenOut:
    """The used part of torch's kernels for GPUs, on the CPU; tensors [b, heads, s, d]."""

    def __init__(self, aligned: int) -> None:
        self.aligned = aligned

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        assert q.shape[1] == k.shape[1]
        assert q.shape[-1] % 8 == 0
        scores = self.scores(q, k, causal, scale)
        log_sum = scores.logsumexp(-1)
        output = (scores - log_sum.unsqueeze(-1)).exp() @ v
        return output, functional.pad(log_sum, (0, -q.shape[2] % self.aligned), value=torch.nan)

    def backward(
        self, inputs: Sequence[Tensor], o: Tensor, log_sum: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        g, q, k, v = inputs
        assert log_sum.is_contiguous()
        assert log_sum.shape[-1] == q.shape[2] + -q.shape[2] % self.aligned
        weights = (self.scores(q, k, causal, scale) - log_sum[..., : q.shape[2]].unsqueeze(-1)).exp()
        of_scores = weights * (g @ v.transpose(-1, -2) - (g * o).sum(-1, keepdim=True)) * scale
        return of_scores @ k, of_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ g

    @staticmethod
    def scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
        scores = q @ k.transpose(-1, -2) * scale
        return (
            scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
            if causal
            else scores
        )


def written_out(flash: bool) -> SimpleNamespace:
    """Both kernels under the names, and with the arguments, of torch's operators."""
    out = WrittenOut(1 if flash else 32)

    def flash_backward(*tensors: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        g, q, k, v, o, log_sum, _, _, _, _, _, causal, _, _ = tensors
        return out.backward((g, q, k, v), o, log_sum, bool(causal), scale)

    def efficient_backward(*tensors: Tensor, scale: float) -> tuple[Tensor | None, ...]:
        g, q, k, v, _, o, log_sum, _, _, _, _, causal = tensors
        return *out.backward((g, q, k, v), o, log_sum, bool(causal), scale), None

    return SimpleNamespace(
        _scaled_dot_product_flash_attention=lambda q, k, v, _p, causal, _debug, scale: out.forward(
            q, k, v, causal, scale
        ),
        _scaled_dot_product_flash_attention_backward=flash_backward,
        _scaled_dot_product_efficient_attention=lambda q, k, v, _bias, _sums, _p, causal, scale: out.forward(
            q, k, v, causal, scale
        ),
        _scaled_dot_product_efficient_attention_backward=efficient_backward,
    )


def use_gpu_kernels(monkeypatch: pytest.MonkeyPatch, flash: bool) -> None:
    monkeypatch.setattr(attention_block, "_flash", lambda *_: flash)
    monkeypatch.setattr(attention_block, "_on_host", attention_block._on_gpu)
    monkeypatch.setattr(attention_block, "_on_host_backward", attention_block._on_gpu_backward)


@pytest.fixture(params=["host", "flash", "efficient"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All ways of computing a block, each on the CPU: those of GPUs over kernels that are written out."""
    if request.param != "host":
        use_gpu_kernels(monkeypatch, request.param == "flash")
        monkeypatch.setattr(attention_block, "aten", written_out(request.param == "flash"))
    return str(request.param)


@pytest.mark.parametrize("size", [16, 12])
@pytest.mark.parametrize("flash", [False, True])
def test_operators_of_gpus_take_what_they_are_given(
    monkeypatch: pytest.MonkeyPatch, flash: bool, size: int
) -> None:
    """By torch's own account of their arguments and shapes, on its device without memory."""
    use_gpu_kernels(monkeypatch, flash)
    q, k = (torch.empty(12, 2, heads, size, dtype=torch.bfloat16, device="meta") for heads in (6, 2))
    output, log_sum = attend(q, k, k, True, SCALE)
    assert (output.shape, output.dtype) == (q.shape, q.dtype)
    assert (log_sum.shape, log_sum.dtype) == ((2, 6, 12), torch.float32)
    gradients = attend_backward(output, (q, k, k), output, log_sum, True, SCALE)
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, k.shape]


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
    output, log_sum = attend(q.detach(), k.detach(), v.detach(), causal, SCALE)
    torch.testing.assert_close(output, reference.detach(), rtol=1e-5, atol=1e-6)
    found = attend_backward(gradient, (q.detach(), k.detach(), v.detach()), output, log_sum, causal, SCALE)
    for mine, parameter in zip(found, (q, k, v), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-4, atol=1e-6)


def test_two_blocks_merge_to_the_whole(kernel: str) -> None:
    q, k, v = tensors()
    reference = expected(q, k, v, False)
    first, log_first = attend(q, k[:5], v[:5], False, SCALE)
    second, log_second = attend(q, k[5:], v[5:], False, SCALE)
    output, log_sum = first.clone(), log_first.contiguous()
    merge(output, log_sum, second, log_second)
    torch.testing.assert_close(output, reference, rtol=1e-5, atol=1e-6)
    # The backward pass of a part, given the whole's output, is the whole's gradient for that part.
    k.requires_grad_()
    gradient = torch.randn_like(output)
    expected(q, k, v, False).backward(gradient)
    part = attend_backward(gradient, (q, k.detach()[5:], v[5:]), output, log_sum, False, SCALE)
    assert k.grad is not None
    torch.testing.assert_close(part[1], k.grad[5:], rtol=1e-4, atol=1e-6)
