"""What a rank holds before it holds anything of a model: the interpreter, its libraries, their kernels."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.optim.adamw import adamw


def library_bytes() -> int:
    """Resident bytes of this process once it has loaded and used what a run uses; 0 if that is not to be had.

    Call it before anything large is made. Takes about a second.
    """
    for module in ("hpctrain.checkpoint.write", "hpctrain.data.tokens"):
        import_module(module)
    weight = nn.Parameter(torch.zeros(64, 64))
    heads = functional.linear(torch.ones(1, 4, 64, 64), weight)
    functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()
    _update(weight)
    return resident_bytes()


@torch.no_grad()
def _update(weight: nn.Parameter) -> None:
    assert weight.grad is not None
    adamw(
        [weight],
        [weight.grad],
        [torch.zeros_like(weight)],
        [torch.zeros_like(weight)],
        [],
        [torch.zeros(())],
        fused=True,
        amsgrad=False,
        beta1=0.9,
        beta2=0.95,
        lr=0.0,
        weight_decay=0.0,
        eps=1e-8,
        maximize=False,
    )


def resident_bytes() -> int:
    """What this process has resident now; 0 where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return 0
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
