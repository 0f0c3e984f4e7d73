"""Attention of one block of queries over one block of keys, with its log-sum-exp.

Blocks can be combined: two outputs over different keys merge by their log-sum-exps. The backward pass of a
block is exact if it receives the output and the log-sum-exp over all keys (FlashAttention, arXiv 2205.14135;
ring attention, arXiv 2310.01889). Tensors are [s, b, heads, d], and keys and values may have fewer heads. The
log-sum-exp is [b, heads, s] in fp32.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten

HEAD_ALIGNMENT, LOG_SUM_ALIGNMENT = 8, 32
"""Multiples to which kernels of GPUs pad the features of a head, and its log-sum-exps."""

NO_DROPOUT = 0.0


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output [s, b, heads, d] and the log-sum-exp [b, heads, s] of one block.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        causal: True if a query sees only keys at its own and earlier positions.
        scale: Factor of the products of queries and keys.
    """
    q, k, v = (_heads_first(x) for x in (query, key, value))
    output, log_sum = (_on_host if q.is_cpu else _on_gpu)(q, k, v, is_causal=causal, scale=scale)
    return _sequence_first(output), log_sum


def attend_backward(
    output_gradient: Tensor,
    operands: tuple[Tensor, Tensor, Tensor],
    output: Tensor,
    log_sum: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value through one block.

    Args:
        output_gradient: Gradient of the output over all keys.
        operands: Queries, keys and values of the block.
        output: Output over all keys that the queries attend to.
        log_sum: Log-sum-exp over all these keys.
        causal: True if a query sees only keys at its own and earlier positions.
        scale: Factor of the products of queries and keys.
    """
    g, q, k, v, o = (_heads_first(x) for x in (output_gradient, *operands, output))
    backward = _on_host_backward if q.is_cpu else _on_gpu_backward
    dq, dk, dv = backward(g, q, k, v, o, log_sum, is_causal=causal, scale=scale)
    return _sequence_first(dq), _sequence_first(dk), _sequence_first(dv)


# Flash attention of torch for the CPU. All tensors are [b, heads, s, d].
_on_host = aten._scaled_dot_product_flash_attention_for_cpu
_on_host_backward = partial(aten._scaled_dot_product_flash_attention_for_cpu_backward, dropout_p=NO_DROPOUT)


def _on_gpu(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp by torch's kernels for GPUs: flash, or memory-efficient for any dtype."""
    size, rows = q.shape[-1], q.shape[2]
    q, k, v = (_padded(x) for x in (q, _repeated(k, q), _repeated(v, q)))
    if _flash(q, k, v, is_causal):
        kernel = aten._scaled_dot_product_flash_attention
        output, log_sum, *_ = kernel(q, k, v, NO_DROPOUT, is_causal, False, scale=scale)
    else:
        kernel = aten._scaled_dot_product_efficient_attention
        output, log_sum, *_ = kernel(q, k, v, None, True, NO_DROPOUT, is_causal, scale=scale)
    return output[..., :size], log_sum[..., :rows]


def _on_gpu_backward(*tensors: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients by torch's kernels for GPUs, for the operands of the CPU's operator."""
    g, q, k, v, o, log_sum = tensors
    size, keys = q.shape[-1], k
    g, q, k, v, o = (_padded(x) for x in (g, q, _repeated(k, q), _repeated(v, q), o))
    rows, columns = q.shape[2], k.shape[2]
    random = [torch.empty(2, dtype=torch.int64, device=q.device)] * 2  # random state, unused without dropout
    if _flash(q, k, v, is_causal):
        log_sum, kernel = log_sum.contiguous(), aten._scaled_dot_product_flash_attention_backward
        dq, dk, dv = kernel(
            g, q, k, v, o, log_sum, None, None, rows, columns, NO_DROPOUT, is_causal, *random, scale=scale
        )
    else:
        # This kernel pads its log-sum-exps; padding must have no weight.
        log_sum = functional.pad(log_sum, (0, -rows % LOG_SUM_ALIGNMENT), value=torch.inf)
        kernel, needed = aten._scaled_dot_product_efficient_attention_backward, [True, True, True, False]
        dq, dk, dv, _ = kernel(
            g, q, k, v, None, o, log_sum, *random, NO_DROPOUT, needed, is_causal, scale=scale
        )
    return dq[..., :size], _summed(dk[..., :size], keys), _summed(dv[..., :size], keys)


def _flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    """Return True if this GPU has flash attention for these tensors."""
    cuda = torch.backends.cuda
    return cuda.can_use_flash_attention(cuda.SDPAParams(q, k, v, None, NO_DROPOUT, is_causal, False))


def merge(output: Tensor, log_sum: Tensor, other: Tensor, other_log_sum: Tensor) -> None:
    """Merge output and log-sum-exp over other keys into fp32 `output` and `log_sum`, in place."""
    both = torch.logaddexp(log_sum, other_log_sum)
    weight = (log_sum - both).exp().permute(2, 0, 1).unsqueeze(-1)
    other_weight = (other_log_sum - both).exp().permute(2, 0, 1).unsqueeze(-1)
    output.mul_(weight).addcmul_(other.to(output.dtype), other_weight)
    log_sum.copy_(both)


def _heads_first(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3)


def _sequence_first(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3)


def _repeated(x: Tensor, like: Tensor) -> Tensor:
    """Return x [b, heads, s, d] with heads repeated to as many as `like` has."""
    return x.repeat_interleave(like.shape[1] // x.shape[1], dim=1)


def _summed(x: Tensor, like: Tensor) -> Tensor:
    """Return x with the heads summed that `_repeated` has repeated."""
    batch, _, rows, size = x.shape
    return x.view(batch, like.shape[1], -1, rows, size).sum(2)


def _padded(x: Tensor) -> Tensor:
    """Return x with features padded by zeros to a size that kernels of GPUs accept."""
    return functional.pad(x, (0, -x.shape[-1] % HEAD_ALIGNMENT))
