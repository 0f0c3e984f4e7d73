"""Memory of a rank beside its model: the interpreter, its libraries, and their kernels."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpctrain.host.memory import release_freed_memory, resident_bytes
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.optimizer import ElementBatch
from hpctrain.parallel.kernels.matmul_kernels import ONEDNN
from hpctrain.parallel.shards import UpdateSettings
from hpctrain.sharding.state import MASTER

_LATER_BYTES = 12 << 20
"""Bytes that a run allocates after this measurement beside tensors: Python's objects, and code of libraries.

Measurements with dense models of 5M to 96M parameters gave 8 to 21 MB.
"""


def library_bytes() -> int:
    """Return the bytes that a run has beside tensors, in this process. Local.

    Call it before anything large exists, and after kernels have been measured, since oneDNN keeps what it has
    prepared for a measurement. Memory that is free is returned to the system first. Takes about a second.

    Returns:
        The resident bytes of this process after it has used the libraries of a run, and an estimate of later
        allocations. If the system does not report resident bytes, only the estimate.
    """
    for module in ("hpctrain.checkpoint.save", "hpctrain.data.tokens"):
        import_module(module)
    weight = nn.Parameter(torch.zeros(64, 64))
    heads = functional.linear(torch.ones(1, 4, 64, 64), weight)
    mixed = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    mixed = functional.rms_norm(mixed, (64,), weight[0])
    mixed = functional.layer_norm(mixed, (64,), weight[0], weight[1])
    mixed = functional.silu(mixed) * functional.gelu(mixed, approximate="tanh")
    rows = mixed.flatten(0, 2) + functional.embedding(torch.arange(256) % 64, weight)
    chosen = functional.linear(rows, weight).log_softmax(-1)[torch.arange(256), torch.arange(256) % 64]
    (-chosen.mean()).backward()
    assert weight.grad is not None
    state = {MASTER: weight} | {name: torch.zeros_like(weight) for name in AdamW.names}
    AdamW((0.9, 0.95), 1e-8, 0.0).update(
        [ElementBatch(state, weight.grad, torch.zeros(()), UpdateSettings())], 0.0, 1.0
    )
    _load_code_of_steps(rows, weight.detach())
    release_freed_memory()
    return resident_bytes() + _LATER_BYTES


def _load_code_of_steps(rows: Tensor, weight: Tensor) -> None:
    """Load the code of further functions of torch and oneDNN that steps use, 8 MB, by calling them once.

    The system loads the code of a function when it is first used.

    Args:
        rows: Any fp32 matrix [r, k].
        weight: Any fp32 matrix [n, k].
    """
    rows = rows.detach()
    if ONEDNN.is_available(torch.float32):
        ONEDNN.forward(rows, weight)
    halves = functional.linear(rows.bfloat16(), weight.bfloat16())
    chosen = halves.float().topk(2).indices
    torch.bincount(chosen.flatten().sort().values)
    torch.isfinite(torch.linalg.vector_norm(rows.double().cos() + rows.sin().exp())).all()
