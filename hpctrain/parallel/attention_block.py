"""Attention of one block of queries over one block of keys, with its log-sum-exp.

Blocks can be combined: two outputs over different keys merge by their log-sum-exps, and the backward
pass of a block is exact when it is given the output and log-sum-exp over all keys (FlashAttention,
arXiv 2205.14135; ring attention, arXiv 2310.01889). Tensors are [s, b, heads, d]; keys and values may
have fewer heads; the log-sum-exp is [b, heads, s] fp32.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output [s, b, heads, d] and log-sum-exp [b, heads, s] of one block."""
    q, k, v = (_heads_first(x) for x in (query, key, value))
    output, log_sum = (_fused if q.device.type == "cpu" else _plain)(q, k, v, causal)
    return _sequence_first(output), log_sum


def attend_backward(
    output_gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key, value [s, b, heads, d] through one block.

    `output` and `log_sum` are those over all keys that the queries attend to.
    """
    g, q, k, v, o = (_heads_first(x) for x in (output_gradient, query, key, value, output))
    backward = _fused_backward if q.device.type == "cpu" else _plain_backward
    of_query, of_key, of_value = backward(g, q, k, v, o, log_sum, causal)
    return _sequence_first(of_query), _sequence_first(of_key), _sequence_first(of_value)


def _fused(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Torch's flash attention for the CPU; all tensors [b, heads, s, d]."""
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return output, log_sum


def _fused_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, log_sum: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g, q, k, v, o, log_sum, 0.0, causal
    )
    return of_query, of_key, of_value


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The same written out, for devices without a fused kernel that gives the log-sum-exp in fp32."""
    scores = _scores(q, k, causal)
    log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum.unsqueeze(-1)).exp().to(v.dtype)
    return weights @ _repeated(v, q), log_sum


def _plain_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, log_sum: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    weights = (_scores(q, k, causal) - log_sum.unsqueeze(-1)).exp()
    delta = (g.float() * o.float()).sum(-1, keepdim=True)
    of_weights = g.float() @ _repeated(v, q).float().transpose(-1, -2)
    of_scores = weights * (of_weights - delta) / sqrt(q.shape[-1])
    of_query = of_scores @ _repeated(k, q).float()
    of_key = _summed(of_scores.transpose(-1, -2) @ q.float(), k)
    of_value = _summed(weights.transpose(-1, -2) @ g.float(), v)
    return of_query.to(q.dtype), of_key.to(k.dtype), of_value.to(v.dtype)


def merge(output: Tensor, log_sum: Tensor, other: Tensor, other_log_sum: Tensor) -> None:
    """Merge another block's output, and its log-sum-exp, into fp32 `output` and `log_sum`, in place."""
    both = torch.logaddexp(log_sum, other_log_sum)
    keep = (log_sum - both).exp().permute(2, 0, 1).unsqueeze(-1)
    add = (other_log_sum - both).exp().permute(2, 0, 1).unsqueeze(-1)
    output.mul_(keep).addcmul_(other.to(output.dtype), add)
    log_sum.copy_(both)


def _heads_first(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3)


def _sequence_first(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3)


def _repeated(x: Tensor, like: Tensor) -> Tensor:
    """Heads of x [b, heads, s, d] repeated to as many as `like` has."""
    return x.repeat_interleave(like.shape[1] // x.shape[1], dim=1)


def _summed(x: Tensor, like: Tensor) -> Tensor:
    """The transpose of `_repeated`: heads that share one are summed."""
    batch, _, rows, size = x.shape
    return x.view(batch, like.shape[1], -1, rows, size).sum(2)


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Scaled products [b, heads, s, s] fp32, those with later positions minus infinity."""
    scores = (q @ _repeated(k, q).transpose(-1, -2)).float() / sqrt(q.shape[-1])
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(later, -torch.inf)
    return scores
