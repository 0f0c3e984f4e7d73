"""Sizes of a model: arithmetic only, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from hpctrain.deck.presets import Sizes
from hpctrain.deck.schema import Deck

Recomputed = int | Literal["none", "full", "selective", "sqrt"]
"""What backward computes again; a number is that of blocks of which only the first one's input is kept."""


@dataclass(frozen=True)
class ModelShape(Sizes):
    """The sizes that fix a decoder-only transformer.

    `gpt2`: learned positions, LayerNorm, GELU, biases. `llama`: RoPE, RMSNorm, SwiGLU, no biases.
    """

    sequence: int
    tied: bool
    dropout: float = 0.0
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5
    initial_std: float = 0.02

    @staticmethod
    def of(deck: Deck, vocabulary: int) -> ModelShape:
        """The shape that a deck asks for, with the vocabulary already settled."""
        settled: dict[str, Any] = {"vocabulary": vocabulary, "sequence": deck.batch.sequence}
        names = {field.name for field in fields(ModelShape)} - settled.keys()
        return ModelShape(**{name: getattr(deck.model, name) for name in names}, **settled)

    @property
    def head_size(self) -> int:
        """Features of one attention head."""
        return self.hidden // self.heads

    @property
    def biases(self) -> bool:
        """Whether linear layers and norms carry biases."""
        return self.family == "gpt2"
