"""Sizes, parameters and FLOPs of a model: arithmetic only, no tensors."""

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

    @property
    def matrix_parameters(self) -> int:
        """Elements of all matrices that activations are multiplied with, the head included."""
        heads = self.heads + self.key_value_heads
        attention = 2 * self.hidden * self.head_size * heads
        feed_forward = (2 if self.family == "gpt2" else 3) * self.hidden * self.mlp
        return self.layers * (attention + feed_forward) + self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Elements of all parameters, without padding."""
        norms = (2 * self.layers + 1) * self.hidden * (2 if self.biases else 1)
        total = self.matrix_parameters + norms
        if not self.tied:
            total += self.vocabulary * self.hidden
        if self.family == "gpt2":
            attention_biases = self.head_size * (self.heads + 2 * self.key_value_heads) + self.hidden
            total += self.layers * (attention_biases + self.mlp + self.hidden)
            total += self.sequence * self.hidden
        return total

    @property
    def flops_per_token(self) -> float:
        """FLOPs of one token's forward and backward pass (arXiv 2104.04473, without recomputation).

        6 for every matrix element, and 12 l h s for the products of queries, keys and values; the
        causal mask is not subtracted, as in the paper.
        """
        attention = 12 * self.layers * self.heads * self.head_size * self.sequence
        return 6.0 * self.matrix_parameters + attention

    def recomputed_flops_per_token(self, recompute: Recomputed) -> float:
        """FLOPs that recomputation adds to one token's backward pass: the forward pass again.

        Of all blocks, or of the products of queries, keys and values alone ("selective").
        """
        attention = 4.0 * self.layers * self.heads * self.head_size * self.sequence
        if recompute in {"none", "selective"}:
            return attention if recompute == "selective" else 0.0
        return 2.0 * (self.matrix_parameters - self.vocabulary * self.hidden) + attention
