"""Model of a deck in plain torch, which peers train.

Apart from NCCL in `comm/`, only the modules of `bench/peers/` use torch.distributed.
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
        key_width, query_width = shape.head_size * shape.key_value_heads, shape.head_size * shape.heads
        self.head_size = shape.head_size
        biased = shape.attention_bias != "none"
        self.query = nn.Linear(shape.hidden, query_width, bias=biased)
        self.key = nn.Linear(shape.hidden, key_width, bias=biased)
        self.value = nn.Linear(shape.hidden, key_width, bias=biased)
        self.output = nn.Linear(query_width, shape.hidden, bias=shape.attention_bias == "all")

    def forward(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_size)) for layer in (self.query, self.key, self.value)
        )
        if rotary is not None:
            query, key = (
                rotate(part.transpose(0, 1), *rotary.tables).transpose(0, 1) for part in (query, key)
            )
        grouped = query.shape[2] != key.shape[2]
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=grouped
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
    """Return a norm of the kind that the model has."""
    if shape.norm == "rms":
        return nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
    return nn.LayerNorm(shape.hidden, eps=shape.norm_epsilon, bias=shape.norm_bias)


class TorchBlock(nn.Module):
    """Transformer block in plain torch: attention and feed-forward with norms before them."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm, self.attention = torch_norm(shape), _Attention(shape)
        self.feed_forward_norm, self.feed_forward = torch_norm(shape), _FeedForward(shape)

    def forward(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        """Return the output of hidden states [batch, seq, hidden], of the same shape."""
        x = x + self.attention(self.attention_norm(x), rotary)
        output: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return output


class TorchModel(nn.Module):
    """Model of a deck, or a range of its layers, in plain torch, with batch-first tensors.

    Args:
        shape: Sizes of the complete model.
        layers: Layers to build; None for all. If they contain embedding and head of a tied model, these share
            their weight.
    """

    def __init__(self, shape: ModelShape, layers: LayerRange | None = None) -> None:
        super().__init__()
        layers = LayerRange.all_of(shape.layers) if layers is None else layers
        self.shape, self.first = shape, layers.first
        embeds, predicts = layers.has_embedding, layers.has_head
        learned = embeds and shape.positions == "learned"
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden) if embeds else None
        self.positions = nn.Embedding(shape.sequence, shape.hidden) if learned else None
        self.blocks = nn.ModuleList(TorchBlock(shape) for _ in range(layers.first, layers.last))
        self.final_norm = torch_norm(shape) if predicts else None
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False) if predicts else None
        if shape.tied and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states or logits.

        Args:
            x: Tokens [batch, seq] if the model has the embedding, otherwise hidden states with a third
                dimension.

        Returns:
            Logits [batch, seq, vocabulary] if the model has the head, otherwise hidden states.
        """
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


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits [batch, seq, vocabulary] and targets [batch, seq]."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
