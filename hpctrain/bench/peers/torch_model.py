"""The deck's model in plain torch, which peers train.

Only what hpctrain is measured against uses torch.distributed: files here whose names begin with torch_,
`bench/peers/collective_calls.py` and `bench/peers/peer_process.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpctrain.deck.activations import ACTIVATIONS
from hpctrain.model.attention.rotary import Rotary, RotaryFrequencies
from hpctrain.model.part import LayerRange
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.kernels.attention_inputs import rotate


class _Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        inner, whole = shape.head_size * shape.key_value_heads, shape.head_size * shape.heads
        self.head_size = shape.head_size
        biased = shape.attention_bias != "none"
        self.query = nn.Linear(shape.hidden, whole, bias=biased)
        self.key = nn.Linear(shape.hidden, inner, bias=biased)
        self.value = nn.Linear(shape.hidden, inner, bias=biased)
        self.output = nn.Linear(whole, shape.hidden, bias=shape.attention_bias == "all")

    def forward(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_size)) for layer in (self.query, self.key, self.value)
        )
        if rotary is not None:
            query, key = (
                rotate(part.transpose(0, 1), *rotary.tables).transpose(0, 1) for part in (query, key)
            )
        shared = query.shape[2] != key.shape[2]
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=shared
        )
        output: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return output


class _FeedForward(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[shape.activation]
        biased = shape.mlp_bias
        self.gate = nn.Linear(shape.hidden, shape.mlp, bias=biased) if self.activation.gated else None
        self.up = nn.Linear(shape.hidden, shape.mlp, bias=biased)
        self.down = nn.Linear(shape.mlp, shape.hidden, bias=biased)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        function = self.activation.function.value
        inner = function(inner) if self.gate is None else function(self.gate(x)) * inner
        output: Tensor = self.down(inner)
        return output


def torch_norm(shape: ModelShape) -> nn.Module:
    """The norm of the model's family."""
    if shape.norm == "rms":
        return nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
    return nn.LayerNorm(shape.hidden, eps=shape.norm_epsilon, bias=shape.norm_bias)


class TorchBlock(nn.Module):
    """Attention and feed-forward in plain torch, [b, s, h]."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm, self.attention = torch_norm(shape), _Attention(shape)
        self.feed_forward_norm, self.feed_forward = torch_norm(shape), _FeedForward(shape)

    def forward(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        """[b, s, h] -> the same."""
        x = x + self.attention(self.attention_norm(x), rotary)
        output: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return output


class TorchModel(nn.Module):
    """The deck's model, or the piece of it that `span` says, in plain torch, batch first.

    Positions of gpt2 are learned. Where both tables of a tied model are in it, they are one.
    """

    def __init__(self, shape: ModelShape, span: LayerRange | None = None) -> None:
        super().__init__()
        span = LayerRange.all_of(shape.layers) if span is None else span
        self.shape, self.first = shape, span.first
        embeds, predicts = span.has_embedding, span.has_head
        learned = embeds and shape.positions == "learned"
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden) if embeds else None
        self.positions = nn.Embedding(shape.sequence, shape.hidden) if learned else None
        self.blocks = nn.ModuleList(TorchBlock(shape) for _ in range(span.first, span.last))
        self.final_norm = torch_norm(shape) if predicts else None
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False) if predicts else None
        if shape.tied and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [b, s] or hidden states [b, s, h] -> hidden states, or logits [b, s, V]."""
        positions = torch.arange(x.shape[1])
        if self.embedding is not None:
            x = self.embedding(x)
        if self.positions is not None:
            x = x + self.positions(positions)
        rotary = None
        if self.shape.positions == "rotary":
            rotary = Rotary(positions, RotaryFrequencies.of(self.shape), x.dtype)
        for block in self.blocks:
            x = block(x, rotary)
        return x if self.head is None or self.final_norm is None else self.head(self.final_norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of logits [b, s, V] where targets [b, s] come next."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
