"""Description of a family of transformers: defaults of keys of [model], files of `transformers`, presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Positions = Literal["learned", "rotary", "none"]
"""How a model knows positions: learned vectors, rotated queries and keys, or the causal mask alone."""

AttentionBias = Literal["none", "query_key_value", "all"]
"""Layers of attention that have biases: none, those of queries, keys and values, or the output layer too."""

QueryKeyNorm = Literal["none", "head", "all", "layer_per_head"]
"""Norm of queries and keys: none, RMSNorm over each head or over all heads together, or LayerNorm over each
head, with a weight of its own for each head."""

NormKind = Literal["layer", "rms"]
"""Norm of hidden states: LayerNorm or RMSNorm."""

NormWeight = Literal["plain", "one_plus", "none"]
"""Factor of normalized features: a weight, a weight plus one, or none."""

NormPlacement = Literal["before", "after", "both"]
"""Norms of attention and feed-forward parts: of their inputs, of their outputs, or of both."""

ParallelResidual = Literal["none", "one_norm", "two_norms"]
"""Whether both parts of a block read the same hidden states, after one norm or each after its own."""

MXFP4 = "mxfp4"
"""Weights in 4 bits with a scale for each block of 32, as gpt-oss is published."""

ROPE_KEYS = ("rope_theta", "partial_rotary_factor")
"""Usual keys of a config.json for the base of rotary positions and for the share of rotated features."""

_NONE: Mapping[str, Any] = MappingProxyType({})
_ATTENTION_DROPOUT: Mapping[str, float] = MappingProxyType({"attention_dropout": 0.0})
USUAL_SIZE_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "vocabulary": "vocab_size",
        "sequence": "max_position_embeddings",
        "hidden": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "mlp": "intermediate_size",
    }
)
"""Usual keys of a config.json for the sizes of `ModelType.sizes`, by the field of a ModelShape."""


@dataclass(frozen=True, kw_only=True)
class FamilyDefaults:
    """Defaults of keys of [model] in a family. The names are those of the keys, whose help explains them.

    Attributes:
        scaled_embedding: True if the default of model.embedding_multiplier is the root of model.hidden.
        tied: Default of model.tied, except for reward models.
    """

    positions: Positions = "rotary"
    rotary_fraction: float = 1.0
    rotation_pattern: tuple[bool, ...] = ()
    windows: tuple[int, ...] = ()
    query_key_value_clip: float = 0.0
    attention_cap: float = 0.0
    attention_sinks: bool = False
    norm: NormKind = "rms"
    norm_weight: NormWeight = "plain"
    norm_bias: bool = False
    norm_placement: NormPlacement = "before"
    query_key_norm: QueryKeyNorm = "none"
    parallel_residual: ParallelResidual = "none"
    attention_bias: AttentionBias = "none"
    mlp_bias: bool = False
    activation: str = "swiglu"
    scaled_embedding: bool = False
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_cap: float = 0.0
    tied: bool = False


@dataclass(frozen=True)
class ConfigKey:
    """Key of a config.json that gives the value of a key of [model].

    Attributes:
        name: Name in the config.json.
        deck_key: Name in [model].
        default: Value if the key is missing.
        form: Form in which config.json stores the value: the value itself, its reciprocal, its inverse square
            ("inverse_root": the deck's value is the inverse root), null for 0 ("cap"), or a list with an
            element for each layer ("layers").
        choices: Pairs of a value in config.json and the value in [model] that it stands for; () for numbers
            and flags.
    """

    name: str
    deck_key: str
    default: Any
    form: Literal["value", "reciprocal", "inverse_root", "cap", "layers"] = "value"
    choices: tuple[tuple[Any, Any], ...] = ()


@dataclass(frozen=True)
class WindowKeys:
    """Keys of a config.json that say which layers have a window of `sliding_window` keys.

    Attributes:
        size: Default of `sliding_window`; None for no window.
        has_layer_types: True if `layer_types` names the layers with a window.
        requires_layer_types: True if there are no windows without `layer_types`.
        full_every: Without `layer_types`, every `full_every`-th layer has no window; 0 if all have one.
        pattern_key: Key whose value replaces `full_every`; "" for none.
        has_use_flag: True if layers have windows only with `use_sliding_window`.
        first_full: Default of `max_window_layers`, before which no layer has a window without `layer_types`;
            None if there is no such key.
        rotate: True if only layers with a window rotate queries and keys.
    """

    size: int | None
    has_layer_types: bool = False
    requires_layer_types: bool = False
    full_every: int = 0
    pattern_key: str = ""
    has_use_flag: bool = False
    first_full: int | None = None
    rotate: bool = False


@dataclass(frozen=True, kw_only=True)
class MixtureFiles:
    """Mixtures of experts in the files of a model type, where they differ from Qwen3-MoE.

    Attributes:
        sizes: Keys of a config.json and their defaults, by the key of [model.experts]. "per_token" is 0 if
            there is no default.
        constants: Keys of [model.experts] with one value in all models, besides family defaults.
        layers: Names of layers, each followed by those of native layers, like `ModelType.layers`.
        gate_up: Names of the layers of an expert that compute gate and up, or of one tensor of all experts.
            The first {} is the number of the block, the second one that of the expert.
        down: Name of the layer of an expert that computes the output, or of one tensor of all experts.
        gates: Order of gate and up in a tensor of all experts; "none" if each expert has its own tensors.
        transposed: True if tensors of all experts have inputs before outputs.
        suffixes: What follows the names of tensors of all experts, for weights and biases.
        normalizes: Default of `norm_topk_prob`; None if there is no such key, and weights are normalized.
        scale: Default of `routed_scaling_factor`; None if there is no such key.
        shared_width: Key and default of the inner width of all shared experts; None if `sizes` says how many
            there are.
        group_method: Key that says whether experts are chosen by groups, its value without groups, which is
            the default, and its value with groups; None if there is no such key.
    """

    sizes: Mapping[str, tuple[str, int]]
    constants: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    layers: tuple[tuple[str, ...], ...] = (("model.layers.{}.mlp.gate", "blocks.{}.feed_forward.router"),)
    gate_up: tuple[str, ...] = (
        "model.layers.{}.mlp.experts.{}.gate_proj",
        "model.layers.{}.mlp.experts.{}.up_proj",
    )
    down: str = "model.layers.{}.mlp.experts.{}.down_proj"
    gates: Literal["concatenated", "interleaved", "none"] = "none"
    transposed: bool = False
    suffixes: Mapping[str, str] = field(
        default_factory=lambda: MappingProxyType({"weight": ".weight", "bias": ".bias"})
    )
    normalizes: bool | None = None
    scale: float | None = None
    shared_width: tuple[str, int] | None = None
    group_method: tuple[str, str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """Model type of `transformers` in whose files the models of a family are, where it differs from Llama.

    Attributes:
        architecture: Name of the language model, such as "LlamaForCausalLM".
        model_type: Value of `model_type` in a config.json.
        layered_architecture: Architecture as which `transformers` reads a config.json with `layer_types`;
            "" for the same.
        sizes: Defaults of vocabulary, positions, width, layers, heads, and width of the feed-forward part.
        size_keys: Keys of these sizes in a config.json.
        key_value_heads: Default of the number of key/value heads; None for as many as heads.
        head_size: Default of the width of a head; None for width / heads.
        epsilon: Key and default of the number that norms add; key "" for a constant.
        tied: Default of `tie_word_embeddings`.
        rope_base: Default of the base of rotary positions.
        rope_keys: Keys of this base and of the share of rotated features outside of `rope_parameters`.
        activation: Key and default of the activation.
        activation_aliases: Activation that `transformers` computes for a value of this key, where its name is
            that of another one.
        gated: True if the feed-forward part has a gate; None if the family's default activation says so.
        layers: Names of layers, each followed by the native layers that it holds. {} is the block's number.
        head_norms: Names of the norms of queries and of keys if they have a weight for each head: a row of a
            matrix, or with a second {} a tensor.
        transposed: True if matrices of blocks are [in, out].
        keys: Further keys of a config.json.
        attention_biases: Values of model.attention_bias that there are. If there are several,
            `attention_bias` in a config.json says whether there are biases.
        required_values: Supported value and default of each key of a config.json that must have one value.
        reward_architecture: Name of the reward model; "" if there is none.
        prefix: Beginning of the names of all layers but the output layer.
        buffers: Regular expression of names of tensors that follow from the sizes.
        grouped: True if query heads may share keys and values, and heads may have any width.
        has_head_size: False if heads have the width / heads, although query heads may share keys and values.
        heads_divide_hidden: True if `transformers` refuses a number of heads that does not divide the width.
        has_rotary_fraction: True if a config.json has the share of rotated features, although the default of
            the family is all. If that default is less, a config.json always has it.
        interleaved: True if neighbors among the features of a head are rotated together, not halves.
        fused_qkv: True if one layer has queries, keys and values, interleaved per head.
        dropouts: Keys of a config.json that mean the same as model.dropout, and their defaults.
        training_noise: Keys of a config.json for random changes in training that no key of [model] describes,
            such as dropout of attention weights, and their defaults.
        constants: Keys of a config.json that are written and not read.
        windows: How a config.json says which layers have a window; None if no layer may have one.
        mixture: Mixtures of experts, which all its models have; None for dense models.
        quantization: `quant_method` of quantized weights that are read in addition to fp8; "" for none.
        longrope_original: Default of `original_max_position_embeddings` outside of `rope_parameters`. With
            "longrope", `transformers` prefers it to the value in there. None if the class has no default.
        rope_kinds: Kinds of scaled rotary positions that `transformers` supports, all with a head size of
            hidden / heads; () for no restriction on either.
        rope_parameters: Rotary positions where a config.json says nothing of them; {} if they are not scaled.
        constant_fields: Fields of a ModelShape with one value in all its models, besides family defaults.
        local_rope: True if layers with windows have rotary positions of their own in a config.json.
        rope_local_base: Default of `rope_local_base_freq`; None for `rope_base` and no such key.
        latent: Keys of a config.json with sizes of latent attention, and their defaults, by the key of
            [model.latent]; that of the features that are not rotated is "plain_size".
    """

    architecture: str
    model_type: str
    sizes: tuple[int, int, int, int, int, int]
    size_keys: tuple[str, ...] = tuple(USUAL_SIZE_KEYS.values())
    key_value_heads: int | None = None
    head_size: int | None = None
    epsilon: tuple[str, float] = ("rms_norm_eps", 1e-6)
    tied: bool = False
    rope_base: float = 10_000.0
    rope_keys: tuple[str, str] = ROPE_KEYS
    activation: tuple[str, str] = ("hidden_act", "silu")
    activation_aliases: Mapping[str, str] = field(default_factory=lambda: _NONE)
    gated: bool | None = None
    layers: tuple[tuple[str, ...], ...] = ()
    head_norms: tuple[str, ...] = ()
    transposed: bool = False
    keys: tuple[ConfigKey, ...] = ()
    attention_biases: tuple[AttentionBias, ...] = ("none", "all")
    required_values: Mapping[str, tuple[Any, Any]] = field(default_factory=lambda: _NONE)
    reward_architecture: str = ""
    layered_architecture: str = ""
    prefix: str = "model."
    buffers: str = r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    grouped: bool = True
    has_head_size: bool = True
    heads_divide_hidden: bool = False
    has_rotary_fraction: bool = False
    interleaved: bool = False
    fused_qkv: bool = False
    dropouts: Mapping[str, float] = field(default_factory=lambda: _NONE)
    training_noise: Mapping[str, float] = field(default_factory=lambda: _ATTENTION_DROPOUT)
    constants: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    windows: WindowKeys | None = None
    mixture: MixtureFiles | None = None
    quantization: Literal["", "mxfp4"] = ""
    longrope_original: int | None = None
    rope_kinds: tuple[str, ...] = ()
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    constant_fields: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    local_rope: bool = False
    rope_local_base: float | None = None
    latent: Mapping[str, tuple[str, int]] = field(default_factory=lambda: _NONE)

    def has_key_for(self, deck_key: str) -> bool:
        """Return True if one of `keys` gives the value of a key of [model]."""
        return any(key.deck_key == deck_key for key in self.keys)

    @property
    def config_sizes(self) -> Mapping[str, tuple[str, int]]:
        """Keys of `sizes` in a config.json and their defaults, by the field of a ModelShape."""
        return dict(zip(USUAL_SIZE_KEYS, zip(self.size_keys, self.sizes, strict=True), strict=True))


@dataclass(frozen=True, kw_only=True)
class Family:
    """Published family of transformers.

    Attributes:
        defaults: Defaults of keys of [model].
        experts: Defaults of keys of [model.experts] that differ from the usual ones.
        model_types: Model types of `transformers` that compute what the family does.
        presets: Published models by name: the fields of a `Preset`.
    """

    defaults: FamilyDefaults
    experts: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    model_types: tuple[ModelType, ...] = ()
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: _NONE)

    @property
    def has_latents(self) -> bool:
        """True if its models have latent attention."""
        return any(model_type.latent for model_type in self.model_types)
