"""What a rank holds before it holds anything of a model: the interpreter, its libraries, their kernels."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import nn
from torch.nn import functional

from hpctrain.host.memory import resident_bytes
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.optimizer import ElementBatch
from hpctrain.parallel.shards import UpdateSettings
from hpctrain.sharding.state import MASTER


def library_bytes() -> int:
    """Resident bytes of this process once it has loaded and used what a run uses; 0 if that is not to be had.

    Call it before anything large is made. Takes about a second.
    """
    for module in ("hpctrain.checkpoint.write", "hpctrain.data.tokens"):
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
    return resident_bytes()
