"""A dense Llama in plain torch: the peer of the rows that measure MFU."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and feed-forward layer with RMSNorm, hidden states [b, s, h]."""

    def __init__(self, hidden: int, heads: int, key_value_heads: int, mlp: int) -> None:
        super().__init__()
        self.size = hidden // heads
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key_value = nn.Linear(hidden, 2 * key_value_heads * self.size, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * mlp, bias=False)
        self.down = nn.Linear(mlp, hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return the hidden states after the block."""
        normed = self.norms[0](x)
        query, key, value = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.query(normed), *self.key_value(normed).chunk(2, -1))
        )

        def rotate(part: Tensor) -> Tensor:
            first, second = part.chunk(2, -1)
            return part * cosine + torch.cat((-second, first), -1) * sine

        attended = functional.scaled_dot_product_attention(
            rotate(query), rotate(key), value, is_causal=True, enable_gqa=key.shape[1] != query.shape[1]
        )
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Llama(nn.Module):
    """Decoder with tied embedding that returns the mean loss."""

    def __init__(self, model: Mapping[str, Any], sequence: int) -> None:
        super().__init__()
        hidden, heads = model["hidden"], model["heads"]
        sizes = hidden, heads, model["key_value_heads"], model["mlp"]
        self.embedding = nn.Embedding(model["vocabulary"], hidden)
        self.blocks = nn.ModuleList(Block(*sizes) for _ in range(model["layers"]))
        self.norm = nn.RMSNorm(hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)
        size = hidden // heads
        rates = 10_000 ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(sequence), rates).repeat(1, 2)
        self.register_buffer("cosine", angles.cos().bfloat16())
        self.register_buffer("sine", angles.sin().bfloat16())

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of tokens [b, s + 1]."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        logits = functional.linear(self.norm(x), self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def tokens_per_second(deck: Mapping[str, Any], device: torch.device, steps: int) -> float:
    """Return the speed of training with DistributedDataParallel on one rank, bf16 autocast and torch.compile.

    Args:
        deck: Tables of an input deck.
        device: A GPU or the CPU.
        steps: Number of timed steps; their median counts.
    """
    batch, model = deck["batch"], Llama(deck["model"], deck["batch"]["sequence"]).to(device)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1
    )
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    compiled = torch.compile(parallel)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    shape = batch["micro_size"], batch["sequence"] + 1
    count = batch["global_size"] // batch["micro_size"]
    tokens = torch.randint(deck["model"]["vocabulary"], shape, device=device)
    seconds = list[float]()
    for _ in range(2 + steps):
        begin = time.perf_counter()
        for index in range(count):
            parallel.require_backward_grad_sync = index == count - 1
            with torch.autocast(device.type, torch.bfloat16):
                loss = compiled(tokens) / count
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    torch.distributed.destroy_process_group()
    return batch["global_size"] * batch["sequence"] / median(seconds[2:])
