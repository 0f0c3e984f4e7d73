"""Sizes of a transformer, without tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from typing_extensions import override

from hpctrain.deck.families import FamilyName, family_values
from hpctrain.deck.family import (
    AttentionBias,
    NormKind,
    NormPlacement,
    NormWeight,
    ParallelResidual,
    Positions,
    QueryKeyNorm,
)
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.adapters import Adapters
from hpctrain.deck.sections.experts import ExpertsTable
from hpctrain.deck.sections.latent import LatentTable
from hpctrain.deck.sections.objective import SCORE_KINDS
from hpctrain.deck.sections.rope_scaling import RopeScaling, rotated_features
from hpctrain.errors import HpctrainError
from hpctrain.model.architecture import Architecture
from hpctrain.model.width_scaling import STANDARD, WidthScaling

Head = Literal["vocabulary", "scalar"]
"""Output layer: logits of all tokens of the vocabulary, or one number per token."""

Recomputed = int | Literal["none", "full", "selective", "sqrt"]
"""Recomputation in backward. A number is the length of segments of blocks that save only their input."""


_FAMILY: Any = None
"""Default of fields whose value is that of the family."""


@dataclass(frozen=True, kw_only=True)
class ModelShape(Architecture):
    """Sizes that define a decoder-only transformer.

    Most fields are keys of `[model]` under the same name; the deck's help explains them. Fields that are left
    out or None have the default of the family.

    Attributes:
        attention_scale: Factor of the products of queries and keys; None for 1 / sqrt(head size).
        head_size: Features of an attention head; 0 is replaced by hidden / heads.
        latent: Sizes of latent attention; None for attention without latents.
        experts: Mixtures of experts; None for a model without them.
        width_scaling: Scaling with the width (muP).
        packed: True if attention is limited to documents within a sequence.
        head: Kind of output layer. A scalar one has its own weight even if embeddings are `tied`.
        mtp_layers: Number of modules of multi-token prediction, whose blocks follow the `layers` blocks.
        adapters: Settings of adapters, which are the only trained parameters besides a scalar head; None
            trains all.
    """

    family: FamilyName
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    mlp: int
    vocabulary: int
    head_size: int = 0
    latent: LatentTable | None = None
    positions: Positions = _FAMILY
    rotary_fraction: float = _FAMILY
    rotation_pattern: tuple[bool, ...] = _FAMILY
    windows: tuple[int, ...] = _FAMILY
    query_key_value_clip: float = _FAMILY
    attention_cap: float = _FAMILY
    attention_sinks: bool = _FAMILY
    norm: NormKind = _FAMILY
    norm_weight: NormWeight = _FAMILY
    norm_bias: bool = _FAMILY
    norm_placement: NormPlacement = _FAMILY
    parallel_residual: ParallelResidual = _FAMILY
    query_key_norm: QueryKeyNorm = _FAMILY
    embedding_multiplier: float = _FAMILY
    residual_multiplier: float = _FAMILY
    attention_scale: float | None = None
    logit_multiplier: float = _FAMILY
    logit_cap: float = _FAMILY
    experts: ExpertsTable | None = None
    sequence: int
    tied: bool
    attention_bias: AttentionBias = _FAMILY
    mlp_bias: bool = _FAMILY
    activation: str = _FAMILY
    dropout: float = 0.0
    rope_base: float = 10_000.0
    rope_local_base: float | None = None
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-5
    initial_std: float = 0.02
    width_scaling: WidthScaling = STANDARD
    packed: bool = False
    head: Head = "vocabulary"
    mtp_layers: int = 0
    adapters: Adapters | None = None

    def __post_init__(self) -> None:
        """Replace the defaults of the family and that of `head_size`."""
        for name, value in family_values(self.family, self.hidden).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if not self.head_size:
            object.__setattr__(self, "head_size", self.hidden // self.heads)

    @staticmethod
    def of(deck: Deck, vocabulary: int) -> ModelShape:
        """Return the shape that a deck asks for.

        Args:
            deck: The deck.
            vocabulary: Size of the vocabulary, which the data may have decided.

        Raises:
            HpctrainError: The deck asks for a user's module.
        """
        if deck.model.module is not None:
            raise HpctrainError(deck.problem("model.module", "is unsupported here: built-in models only"))
        derived: dict[str, Any] = {"vocabulary": vocabulary, "sequence": deck.batch.sequence}
        derived["width_scaling"] = WidthScaling.of(deck)
        derived["packed"] = deck.data.document_mask
        derived["head"] = "scalar" if deck.objective.kind in SCORE_KINDS else "vocabulary"
        derived["tied"] = deck.model.tied and derived["head"] == "vocabulary"
        names = {field.name for field in fields(ModelShape)} - derived.keys()
        return ModelShape(**{name: getattr(deck.model, name) for name in names}, **derived)

    def rotates(self, block: int) -> bool:
        """Return True if the attention of a block rotates queries and keys."""
        pattern = self.rotation_pattern
        return self.positions == "rotary" and (not pattern or pattern[block % len(pattern)])

    @property
    def score_scale(self) -> float:
        """Factor of the products of queries and keys, with that of muP."""
        scale = self.head_size**-0.5 if self.attention_scale is None else self.attention_scale
        return self.width_scaling.of_scores * scale

    def window(self, block: int) -> int:
        """Return how many keys a query of a block sees, with its own; 0 for all earlier ones."""
        return self.windows[block % len(self.windows)] if self.windows else 0

    def is_local(self, block: int) -> bool:
        """Return True if a block rotates by the angles of layers with windows."""
        return self.rope_local_base is not None and self.rotates(block) and self.window(block) > 0

    @property
    def rotated_features(self) -> int:
        """Number of features of an attention head that are rotated."""
        if self.latent is not None:
            return self.latent.rotary_size
        return rotated_features(self.head_size, self.rotary_fraction)

    def is_mixture(self, block: int) -> bool:
        """Return True if a block has a mixture of experts."""
        return self.experts is not None and self.experts.has_experts(block)

    @property
    def mixture_blocks(self) -> tuple[int, ...]:
        """Blocks with a mixture of experts, with those of modules of multi-token prediction."""
        return tuple(filter(self.is_mixture, range(self.layers + self.mtp_layers)))

    @property
    def table_uses_at_end(self) -> int:
        """Number of uses of the embedding's table in the last layer: tied output layer, and MTP modules."""
        return int(self.tied) + int(self.mtp_layers > 0)

    @property
    @override
    def title(self) -> str:
        return self.family

    @property
    @override
    def uses_random_numbers(self) -> bool:
        return self.dropout > 0

    @property
    @override
    def block_count(self) -> int:
        return self.layers
