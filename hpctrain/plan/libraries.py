"""What a rank holds before it holds anything of a model: the interpreter, its libraries, their kernels."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from hpctrain.optim.adamw import fused_update


def library_bytes() -> int:
    """Resident bytes of this process once it has loaded and used what a run uses; 0 if that is not to be had.

    Call it before anything large is made. Takes about a second.
    """
    for module in ("hpctrain.checkpoint.write", "hpctrain.data.tokens"):
        import_module(module)
    weight = nn.Parameter(torch.zeros(64, 64))
    heads = functional.linear(torch.ones(1, 4, 64, 64), weight)
    functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()
    assert weight.grad is not None
    moments = torch.zeros_like(weight), torch.zeros_like(weight)
    updates = [torch.zeros(())]
    fused_update([weight], [weight.grad], [moments[0]], [moments[1]], updates, 0.0, 0.0, (0.9, 0.95), 1e-8)
    return resident_bytes()


def resident_bytes() -> int:
    """What this process has resident now; 0 where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return 0
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
