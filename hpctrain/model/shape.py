"""Sizes of a transformer, without tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from typing_extensions import override

from hpctrain.deck.activations import DEFAULT_ACTIVATIONS
from hpctrain.deck.families import FAMILIES, AttentionBias, FamilyTraits
from hpctrain.deck.presets import Family
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.adapters import Adapters
from hpctrain.deck.sections.experts import ExpertsTable
from hpctrain.deck.sections.objective import SCORE_KINDS
from hpctrain.deck.sections.rope_scaling import RopeScaling
from hpctrain.errors import HpctrainError
from hpctrain.model.architecture import Architecture
from hpctrain.model.width_scaling import STANDARD, WidthScaling

Head = Literal["vocabulary", "scalar"]
"""Output layer: logits of all tokens of the vocabulary, or one number per token."""

Recomputed = int | Literal["none", "full", "selective", "sqrt"]
"""Recomputation in backward. A number is the length of segments of blocks that save only their input."""


EXPERT_KEYS: Mapping[str, str] = {
    "experts": "count",
    "experts_per_token": "per_token",
    "expert_mlp": "mlp",
    "shared_experts": "shared",
    "expert_every": "every",
    "dense_first": "dense_first",
    "router": "router",
    "router_normalize": "router_normalize",
    "router_scale": "router_scale",
    "router_groups": "router_groups",
    "router_groups_per_token": "router_groups_per_token",
}
"""Keys of [model.experts] by the field of a ModelShape."""


@dataclass(frozen=True, kw_only=True)
class ModelShape(Architecture):
    """Sizes that define a decoder-only transformer.

    The family `gpt2` has learned positions, LayerNorm and biases. The family `llama` has rotary positions,
    RMSNorm and no biases. Most fields are keys of `[model]` and `[model.experts]` under the same or a similar
    name; the deck's help explains them.

    Attributes:
        activation: Activation of feed-forward layers; "" is replaced by the default of the family.
        attention_bias: Biases of attention's linear layers; "" is replaced by the default of the family.
        head_size: Features of an attention head; 0 is replaced by hidden / heads.
        parametrization: Scaling with the width (muP).
        packed: True if attention is limited to documents within a sequence.
        head: Kind of output layer. A scalar one has its own weight even if embeddings are `tied`.
        adapters: Settings of adapters, which are the only trained parameters besides a scalar head; None
            trains all.
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    mlp: int
    vocabulary: int
    head_size: int = 0
    query_key_norm: Literal["none", "head", "all"] = "none"
    experts: int = 0
    experts_per_token: int = 2
    expert_mlp: int = 0
    shared_experts: int = 0
    expert_every: int = 1
    dense_first: int = 0
    router: Literal["softmax", "sigmoid"] = "softmax"
    router_normalize: bool = True
    router_scale: float = 1.0
    router_groups: int = 1
    router_groups_per_token: int = 1
    sequence: int
    tied: bool
    attention_bias: AttentionBias | Literal[""] = ""
    activation: str = ""
    dropout: float = 0.0
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-5
    initial_std: float = 0.02
    router_dtype: Literal["fp32", "compute"] = "fp32"
    router_z_loss: float = 0.0
    balance: Literal["loss", "bias", "none"] = "loss"
    balance_loss: float = 0.01
    balance_over: Literal["micro_batch", "sequence", "step"] = "micro_batch"
    balance_rate: float = 0.001
    capacity: float | None = None
    parametrization: WidthScaling = STANDARD
    packed: bool = False
    head: Head = "vocabulary"
    adapters: Adapters | None = None

    def __post_init__(self) -> None:
        """Replace the defaults of `activation`, `attention_bias` and `head_size`."""
        if not self.attention_bias:
            object.__setattr__(self, "attention_bias", FAMILIES[self.family].attention_bias)
        if not self.activation:
            object.__setattr__(self, "activation", DEFAULT_ACTIVATIONS[self.family])
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
        settled: dict[str, Any] = {"vocabulary": vocabulary, "sequence": deck.batch.sequence}
        settled["parametrization"] = WidthScaling.of(deck)
        settled["packed"] = deck.data.document_mask
        settled["head"] = "scalar" if deck.objective.kind in SCORE_KINDS else "vocabulary"
        settled["tied"] = deck.model.tied and settled["head"] == "vocabulary"
        settled |= _mixture(deck)
        names = {field.name for field in fields(ModelShape)} - settled.keys()
        return ModelShape(**{name: getattr(deck.model, name) for name in names}, **settled)

    def is_mixture(self, block: int) -> bool:
        """Return True if a block has a mixture of experts."""
        return self.experts > 0 and block >= self.dense_first and (block + 1) % self.expert_every == 0

    @property
    @override
    def title(self) -> str:
        return self.family

    @property
    @override
    def draws(self) -> bool:
        return self.dropout > 0

    @property
    @override
    def block_count(self) -> int:
        return self.layers

    @property
    def traits(self) -> FamilyTraits:
        """Properties of all models of the family: positions, norms, and biases of feed-forward parts."""
        return FAMILIES[self.family]


def _mixture(deck: Deck) -> dict[str, Any]:
    """Return the fields of a shape that describe mixtures of experts."""
    experts = deck.model.experts
    names = {field.name for field in fields(ModelShape)}
    if experts is None:
        usual = {
            field.name: field.default
            for field in fields(ModelShape)
            if field.name in {*EXPERT_KEYS, *ExpertsTable.model_fields} - {"mlp"}
        }
        return {**usual, "expert_mlp": deck.model.mlp}
    own = {name: getattr(experts, key) for name, key in EXPERT_KEYS.items()}
    return own | {name: getattr(experts, name) for name in names & ExpertsTable.model_fields.keys() - {"mlp"}}
