"""Sizes of a model: arithmetic only, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpctrain.deck.schema import Deck

Family = Literal["gpt2", "llama"]

Recomputed = int | Literal["none", "full", "selective", "sqrt"]
"""What backward computes again; a number is that of blocks of which only the first one's input is kept."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes that fix a decoder-only transformer.

    `gpt2`: learned positions, LayerNorm, GELU, biases. `llama`: RoPE, RMSNorm, SwiGLU, no biases.
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    mlp: int
    vocabulary: int
    sequence: int
    tied: bool
    dropout: float = 0.0
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5
    initial_std: float = 0.02

    @staticmethod
    def of(deck: Deck, vocabulary: int) -> ModelShape:
        """The shape that a deck asks for, with the vocabulary already settled."""
        model = deck.model
        return ModelShape(
            family=model.family,
            layers=model.layers,
            hidden=model.hidden,
            heads=model.heads,
            key_value_heads=model.key_value_heads,
            mlp=model.mlp,
            vocabulary=vocabulary,
            sequence=deck.batch.sequence,
            tied=model.tied,
            dropout=model.dropout,
            rope_base=model.rope_base,
            norm_epsilon=model.norm_epsilon,
            initial_std=model.initial_std,
        )

    @property
    def head_size(self) -> int:
        """Features of one attention head."""
        return self.hidden // self.heads

    @property
    def biases(self) -> bool:
        """Whether linear layers and norms carry biases."""
        return self.family == "gpt2"
