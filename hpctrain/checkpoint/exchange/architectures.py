"""Architectures of Hugging Face's `transformers` that can be imported and exported: tensors and config.json.

Weights are [out, in] here. GPT-2's files have [in, out], with query, key and value concatenated in one layer.
Files of Llama and of most later architectures have the same layers as here, and rotate halves of a head, too.
Most files have one matrix for each expert, while one tensor holds those of all experts here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from hpctrain.checkpoint.exchange.names import (
    ROUTER_BIAS,
    Counterpart,
    HeadOrder,
    HeadRule,
    LatentOrder,
    LayerOrders,
    NameRule,
    PackedRule,
    Rule,
    StackRule,
)
from hpctrain.deck.activations import ACTIVATIONS
from hpctrain.deck.families import CHOICES, FAMILIES, FamilyName, family_values
from hpctrain.deck.family import AttentionBias, ConfigKey, MixtureFiles, ModelType, WindowKeys
from hpctrain.deck.sections.rope_scaling import rotated_features
from hpctrain.model.shape import EXPERT_KEYS, Head, ModelShape

HEAD = "lm_head.weight"

MTP_LAYERS = "num_nextn_predict_layers"
"""Key of a config with the number of modules of multi-token prediction."""

Size = tuple[str, int]
"""Key of a size in config.json, and its value where the key is missing."""

_QUERY_KEY_VALUE = 3
"""Number of native layers that a fused layer of queries, keys and values holds."""

_PARTIAL = frozenset({"phi3", "stablelm"})
"""Model types whose config.json has the share of rotated features, although the family rotates all."""

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class RequiredConfigValue:
    """Key of a config.json for which only some values are supported.

    Attributes:
        key: Name of the key.
        accepted: Supported values. The first one is exported, unless it is None.
        default: Value in `transformers` if the key is missing.
    """

    key: str
    accepted: tuple[object, ...]
    default: object


@dataclass(frozen=True)
class HuggingFaceArchitecture:
    """Architecture of `transformers`: names of its tensors and keys of its config.json.

    Attributes:
        name: Name of the class in `transformers`, such as "LlamaForCausalLM".
        model_type: Value of `model_type` in a config.json.
        family: Family of models here that compute the same.
        rules: Name rules of its tensors.
        prefix: Beginning of all names but the head's. Files that were saved without the head may lack it.
        buffers: Regular expression of names of tensors that are no parameters, such as masks and frequencies,
            which older files may have.
        required_values: Keys of a config.json for which only some values are supported.
        sizes: Key and default of each size, by the field of a ModelShape.
        epsilon: Key and default of the number that norms add; key "" for a constant.
        tied: Default of `tie_word_embeddings`.
        key_value_heads: Default of `num_key_value_heads`; None for as many as heads.
        head_size: Default of `head_dim`; None for width / heads.
        rope_base: Default of `rope_theta`.
        constant_fields: Fields of a ModelShape that have the same values in all its models.
        mixture: Key and default of each size of its mixtures of experts, by the field of a ModelShape;
            empty for dense models.
        normalizes: Default of `norm_topk_prob`; None if there is no such key.
        scale: Default of `routed_scaling_factor`; None if there is no such key.
        windows: Keys that say which layers have a window; None if no layer may have one.
        quantization: `quant_method` of quantized weights that can be read beside fp8; "" for none.
        rope_parameters: Rotary positions of a config.json without such keys; {} without scaled frequencies.
        shared_width: Key and default of the inner width of all shared experts; None if there is no such key.
        local_rope: True if a config.json has separate rotary positions for layers with a window.
        rope_local_base: Default of `rope_local_base_freq`; None for `rope_base` and no such key.
        head: Kind of the output layer.
        hidden_act: Key and default of the activation.
        gated: True if feed-forward layers have a gate.
        attention_biases: Supported values of model.attention_bias. If there are several, `attention_bias`
            of a config.json says whether all layers of attention have biases or none.
        interleaved: True if neighboring features of a head are rotated together, not halves.
        exported: True if models can be exported as this architecture.
        keys: Further keys of a config.json that give values of keys of [model].
        grouped: True if query heads may share heads of keys and values, and heads may have any width.
        dropouts: Keys of a config.json that are exported with model.dropout.
        constants: Keys of a config.json that are exported, but not read.
        latent: Key and default of each size of latent attention, as in a `ModelType`; empty without it.
        group_method: Key that says whether experts are chosen by groups, and its values, as in a `ModelType`;
            None if there is no such key.
    """

    name: str
    model_type: str
    family: FamilyName
    rules: tuple[Rule, ...]
    prefix: str
    buffers: str
    required_values: tuple[RequiredConfigValue, ...]
    sizes: Mapping[str, Size]
    epsilon: tuple[str, float]
    tied: bool = False
    key_value_heads: int | None = None
    head_size: int | None = None
    rope_base: float = 10_000.0
    constant_fields: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    mixture: Mapping[str, Size] = field(default_factory=lambda: _NONE)
    normalizes: bool | None = None
    scale: float | None = None
    windows: WindowKeys | None = None
    quantization: str = ""
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    shared_width: Size | None = None
    local_rope: bool = False
    rope_local_base: float | None = None
    head: Head = "vocabulary"
    hidden_act: tuple[str, str] = ("hidden_act", "silu")
    gated: bool = True
    attention_biases: tuple[AttentionBias, ...] = ("none", "all")
    interleaved: bool = False
    exported: bool = True
    keys: tuple[ConfigKey, ...] = ()
    grouped: bool = True
    dropouts: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    latent: Mapping[str, Size] = field(default_factory=lambda: _NONE)
    group_method: tuple[str, str, str] | None = None

    def choices(self, hidden: int) -> dict[str, Any]:
        """Return keys of [model] whose values all models of a width share, and config.json does not have."""
        values = {**family_values(self.family, hidden), "attention_scale": None, **self.constant_fields}
        expressed = {"tied", "activation", "attention_bias", *(key.deck_key for key in self.keys)}
        if self.partial:
            expressed.add("rotary_fraction")
        if self.windows is not None:
            expressed |= {"windows", "rotation_pattern"} if self.windows.rotate else {"windows"}
        if self.latent:
            expressed.add("attention_scale")
        names = (*CHOICES, "embedding_multiplier", "attention_scale")
        return {name: values[name] for name in names if name not in expressed}

    @property
    def has_mtp(self) -> bool:
        """True if its files may have modules of multi-token prediction."""
        return MTP_LAYERS in self.constants

    @property
    def rotary(self) -> bool:
        """True if it rotates queries and keys."""
        return FAMILIES[self.family].defaults.positions == "rotary"

    @property
    def partial(self) -> bool:
        """True if config.json has the share of rotated features."""
        return _is_partial(self.family, self.model_type)

    def head_order(self, shape: ModelShape) -> LayerOrders | None:
        """Return the order of the features of heads in files; None for models without rotation."""
        if not self.rotary:
            return None
        if shape.latent is not None:
            return LatentOrder(shape.head_size, shape.latent.rotary_size, shape.latent.value_size)
        rotated = rotated_features(shape.head_size, shape.rotary_fraction)
        return HeadOrder(shape.head_size, rotated, self.interleaved)

    def empty_tensors(self, shape: ModelShape) -> Iterator[Counterpart]:
        """Yield the tensors without elements in files of a model without shared experts.

        `transformers` has matrices of the width 0 for shared experts if their number is 0.
        """
        if not shape.experts or shape.shared_experts or "shared_experts" not in self.mixture:
            return
        for rule in self.rules:
            if not isinstance(rule, NameRule) or ".feed_forward.shared." not in rule.native_names[0]:
                continue
            size = (shape.hidden, 0) if rule.native_names[0].endswith(".down") else (0, shape.hidden)
            for block in shape.mixture_blocks:
                yield Counterpart(f"{rule.hf_name.format(block)}.weight", size, False, ())

    @property
    def activations(self) -> dict[str, str]:
        """Name in config.json of each supported activation."""
        default_name, native = self.hidden_act[1], FAMILIES[self.family].defaults.activation
        if not ACTIVATIONS[native].function.hidden_act:
            return {native: default_name}
        return {
            name: default_name
            if default_name in (hf_names := activation.function.hidden_act)
            else hf_names[0]
            for name, activation in ACTIVATIONS.items()
            if activation.gated == self.gated and activation.function.hidden_act
        }

    @property
    def choice_is_biased(self) -> bool:
        """True if routers add a bias to the scores only for choosing experts (`e_score_correction_bias`)."""
        return self.constant_fields.get("balance") == "bias"


def _is_partial(family: FamilyName, model_type: str) -> bool:
    """Return True if config.json of a model type has the share of rotated features."""
    return FAMILIES[family].defaults.rotary_fraction < 1 or model_type in _PARTIAL


_GPT2_RULES = (
    NameRule("transformer.wte", ("embedding.tokens",)),
    NameRule("transformer.wpe", ("embedding.positions",)),
    NameRule("transformer.h.{}.ln_1", ("blocks.{}.attention_norm",)),
    NameRule(
        "transformer.h.{}.attn.c_attn",
        ("blocks.{}.attention.query", "blocks.{}.attention.key", "blocks.{}.attention.value"),
        transposed=True,
    ),
    NameRule("transformer.h.{}.attn.c_proj", ("blocks.{}.attention.output",), transposed=True),
    NameRule("transformer.h.{}.ln_2", ("blocks.{}.feed_forward_norm",)),
    NameRule("transformer.h.{}.mlp.c_fc", ("blocks.{}.feed_forward.up",), transposed=True),
    NameRule("transformer.h.{}.mlp.c_proj", ("blocks.{}.feed_forward.down",), transposed=True),
    NameRule("transformer.ln_f", ("final_norm",)),
    NameRule("lm_head", ("head",)),
)
_LLAMA_RULES = (
    NameRule("model.embed_tokens", ("embedding.tokens",)),
    NameRule("model.layers.{}.input_layernorm", ("blocks.{}.attention_norm",)),
    NameRule("model.layers.{}.self_attn.q_proj", ("blocks.{}.attention.query",)),
    NameRule("model.layers.{}.self_attn.k_proj", ("blocks.{}.attention.key",)),
    NameRule("model.layers.{}.self_attn.v_proj", ("blocks.{}.attention.value",)),
    NameRule("model.layers.{}.self_attn.o_proj", ("blocks.{}.attention.output",)),
    NameRule("model.layers.{}.post_attention_layernorm", ("blocks.{}.feed_forward_norm",)),
    NameRule("model.layers.{}.mlp.gate_proj", ("blocks.{}.feed_forward.gate",)),
    NameRule("model.layers.{}.mlp.up_proj", ("blocks.{}.feed_forward.up",)),
    NameRule("model.layers.{}.mlp.down_proj", ("blocks.{}.feed_forward.down",)),
    NameRule("model.norm", ("final_norm",)),
    NameRule("lm_head", ("head",)),
)
_NORM_RULES = (
    NameRule("model.layers.{}.self_attn.q_norm", ("blocks.{}.attention.query_norm",)),
    NameRule("model.layers.{}.self_attn.k_norm", ("blocks.{}.attention.key_norm",)),
)


def _expert_rules(module: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Return the name rules of a mixture, which is called `module` in a layer."""
    hf_name = f"model.layers.{{}}.{module}"
    native_name = "blocks.{}.feed_forward"
    return (
        NameRule(f"{hf_name}.gate", (f"{native_name}.router",)),
        StackRule(
            (f"{hf_name}.experts.{{}}.{gate}", f"{hf_name}.experts.{{}}.{up}"),
            f"{native_name}.experts.gate_up",
        ),
        StackRule((f"{hf_name}.experts.{{}}.{down}",), f"{native_name}.experts.down"),
    )


_MIXTRAL_RULES = (*_LLAMA_RULES, *_expert_rules("block_sparse_moe", "w1", "w3", "w2"))
_QWEN3_MOE_RULES = (
    *_LLAMA_RULES,
    *_NORM_RULES,
    *_expert_rules("mlp", "gate_proj", "up_proj", "down_proj"),
)
_DEEPSEEK_RULES = (
    *_QWEN3_MOE_RULES,
    NameRule(
        "model.layers.{}.mlp.gate.e_score_correction_bias",
        (f"{ROUTER_BIAS}/blocks.{{}}.feed_forward.router",),
    ),
    *(
        NameRule(
            f"model.layers.{{}}.mlp.shared_experts.{part}_proj", (f"blocks.{{}}.feed_forward.shared.{part}",)
        )
        for part in ("gate", "up", "down")
    ),
)

_LATENT_RULES = tuple(
    NameRule(
        f"model.layers.{{}}.self_attn.{hf_name}",
        tuple(f"blocks.{{}}.attention.{name}" for name in native_names),
        interleaved=len(native_names) > 1 and hf_name == "kv_b_proj",
    )
    for hf_name, *native_names in (
        ("q_a_proj", "query_down"),
        ("q_a_layernorm", "query_down_norm"),
        ("q_b_proj", "query_up"),
        ("kv_a_proj_with_mqa", "latent_down", "shared_key"),
        ("kv_a_layernorm", "latent_norm"),
        ("kv_b_proj", "key_up", "value_up"),
    )
)

_LLAMA_BUFFERS = r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"

# Keys of a config.json that change what a model computes, and have one supported value.
_WHOLE_ROTARY = RequiredConfigValue("partial_rotary_factor", (None, 1, 1.0), None)
_LLAMA_FIXED = (_WHOLE_ROTARY,)


def _sizes(
    vocabulary: int, sequence: int, hidden: int, layers: int, heads: int, mlp: int
) -> Mapping[str, Size]:
    return {
        "vocabulary": ("vocab_size", vocabulary),
        "sequence": ("max_position_embeddings", sequence),
        "hidden": ("hidden_size", hidden),
        "layers": ("num_hidden_layers", layers),
        "heads": ("num_attention_heads", heads),
        "mlp": ("intermediate_size", mlp),
    }


_GPT2 = HuggingFaceArchitecture(
    name="GPT2LMHeadModel",
    model_type="gpt2",
    family="gpt2",
    rules=_GPT2_RULES,
    prefix="transformer.",
    buffers=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
    required_values=(
        RequiredConfigValue("scale_attn_weights", (True,), True),
        RequiredConfigValue("scale_attn_by_inverse_layer_idx", (False,), False),
        RequiredConfigValue("add_cross_attention", (False,), False),
    ),
    sizes={
        "vocabulary": ("vocab_size", 50257),
        "sequence": ("n_positions", 1024),
        "hidden": ("n_embd", 768),
        "layers": ("n_layer", 12),
        "heads": ("n_head", 12),
        "mlp": ("n_inner", 0),
    },
    epsilon=("layer_norm_epsilon", 1e-5),
    tied=True,
    hidden_act=("activation_function", "gelu_new"),
    gated=False,
    attention_biases=("all",),
    grouped=False,
    dropouts=("embd_pdrop", "resid_pdrop"),
    constants=MappingProxyType({"attn_pdrop": 0.0}),
)
_UNCUT: Mapping[str, Any] = MappingProxyType({"attention_dropout": 0.0})
_NO_WINDOW: Mapping[str, Any] = MappingProxyType(
    {"attention_dropout": 0.0, "sliding_window": None, "use_sliding_window": False}
)
_QWEN_WINDOWS = WindowKeys(4096, has_layer_types=True, has_use_flag=True, first_full=28)
_LLAMA = HuggingFaceArchitecture(
    name="LlamaForCausalLM",
    model_type="llama",
    family="llama",
    rules=_LLAMA_RULES,
    prefix="model.",
    buffers=_LLAMA_BUFFERS,
    constants=_UNCUT,
    required_values=(
        RequiredConfigValue("sliding_window", (None,), None),
        _WHOLE_ROTARY,
    ),
    keys=(ConfigKey("mlp_bias", "mlp_bias", False),),
    sizes=_sizes(32000, 2048, 4096, 32, 32, 11008),
    epsilon=("rms_norm_eps", 1e-6),
)
_ARCEE = replace(
    _LLAMA,
    name="ArceeForCausalLM",
    model_type="arcee",
    rules=tuple(rule for rule in _LLAMA_RULES if not rule.hf_name.endswith("gate_proj")),
    sizes=_sizes(32000, 4096, 2560, 32, 32, 18432),
    epsilon=("rms_norm_eps", 1e-5),
    hidden_act=("hidden_act", "relu2"),
    gated=False,
)
_QWEN3 = HuggingFaceArchitecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    family="llama",
    rules=(*_LLAMA_RULES, *_NORM_RULES),
    prefix="model.",
    buffers=_LLAMA_BUFFERS,
    constants=_UNCUT,
    windows=_QWEN_WINDOWS,
    required_values=_LLAMA_FIXED,
    sizes=_sizes(151936, 32768, 4096, 32, 32, 22016),
    epsilon=("rms_norm_eps", 1e-6),
    key_value_heads=32,
    head_size=128,
    constant_fields={"query_key_norm": "head"},
)
_MISTRAL = HuggingFaceArchitecture(
    name="MistralForCausalLM",
    model_type="mistral",
    family="llama",
    rules=_LLAMA_RULES,
    prefix="model.",
    buffers=_LLAMA_BUFFERS,
    constants=_UNCUT,
    required_values=_LLAMA_FIXED,
    windows=WindowKeys(4096),
    sizes=_sizes(32000, 131072, 4096, 32, 32, 14336),
    epsilon=("rms_norm_eps", 1e-6),
    key_value_heads=8,
    attention_biases=("none",),
)
_MINISTRAL = replace(
    _MISTRAL,
    name="MinistralForCausalLM",
    model_type="ministral",
    windows=WindowKeys(4096, has_layer_types=True),
)
_QWEN2 = HuggingFaceArchitecture(
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    family="llama",
    rules=_LLAMA_RULES,
    prefix="model.",
    buffers=_LLAMA_BUFFERS,
    constants=_UNCUT,
    windows=_QWEN_WINDOWS,
    required_values=_LLAMA_FIXED,
    sizes=_sizes(151936, 32768, 4096, 32, 32, 22016),
    epsilon=("rms_norm_eps", 1e-6),
    key_value_heads=32,
    attention_biases=("query_key_value",),
)
_MIXTRAL = HuggingFaceArchitecture(
    name="MixtralForCausalLM",
    model_type="mixtral",
    family="llama",
    rules=_MIXTRAL_RULES,
    prefix="model.",
    buffers=_LLAMA_BUFFERS,
    constants=_UNCUT,
    windows=WindowKeys(None),
    required_values=(_WHOLE_ROTARY,),
    sizes=_sizes(32000, 131072, 4096, 32, 32, 14336),
    epsilon=("rms_norm_eps", 1e-5),
    key_value_heads=8,
    rope_base=1e6,
    attention_biases=("none",),
    mixture={"experts": ("num_local_experts", 8), "experts_per_token": ("num_experts_per_tok", 2)},
)
_QWEN3_MOE = HuggingFaceArchitecture(
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    family="llama",
    rules=_QWEN3_MOE_RULES,
    prefix="model.",
    buffers=_LLAMA_BUFFERS,
    constants=_UNCUT,
    windows=WindowKeys(4096, has_use_flag=True),
    required_values=_LLAMA_FIXED,
    sizes=_sizes(151936, 32768, 2048, 24, 32, 6144),
    epsilon=("rms_norm_eps", 1e-6),
    key_value_heads=4,
    constant_fields={"query_key_norm": "head"},
    mixture={
        "experts": ("num_experts", 128),
        "experts_per_token": ("num_experts_per_tok", 8),
        "expert_mlp": ("moe_intermediate_size", 768),
        "expert_every": ("decoder_sparse_step", 1),
    },
    normalizes=False,
)
_OLMOE = HuggingFaceArchitecture(
    name="OlmoeForCausalLM",
    model_type="olmoe",
    family="llama",
    rules=_QWEN3_MOE_RULES,
    prefix="model.",
    buffers=_LLAMA_BUFFERS,
    constants=_UNCUT,
    required_values=(
        *_LLAMA_FIXED,
        RequiredConfigValue("clip_qkv", (None,), None),
        RequiredConfigValue("sliding_window", (None,), None),
    ),
    sizes=_sizes(50304, 4096, 2048, 16, 16, 2048),
    epsilon=("rms_norm_eps", 1e-5),
    constant_fields={"query_key_norm": "all"},
    mixture={"experts": ("num_experts", 64), "experts_per_token": ("num_experts_per_tok", 8)},
    normalizes=False,
)
_OF_DEEPSEEK = {
    "experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_mlp": "moe_intermediate_size",
    "shared_experts": "n_shared_experts",
    "dense_first": "first_k_dense_replace",
    "router_groups": "n_group",
    "router_groups_per_token": "topk_group",
}
_DOTS1 = HuggingFaceArchitecture(
    name="Dots1ForCausalLM",
    model_type="dots1",
    family="llama",
    rules=_DEEPSEEK_RULES,
    prefix="model.",
    buffers=_LLAMA_BUFFERS,
    constants=_UNCUT,
    required_values=_LLAMA_FIXED,
    sizes=_sizes(152064, 2048, 4608, 62, 32, 10944),
    epsilon=("rms_norm_eps", 1e-6),
    key_value_heads=32,
    constant_fields={"query_key_norm": "head", "router": "sigmoid", "balance": "bias"},
    mixture=dict(
        zip(_OF_DEEPSEEK, zip(_OF_DEEPSEEK.values(), (1, 1, 1408, 0, 0, 1, 1), strict=True), strict=True)
    ),
    normalizes=False,
    scale=1.0,
    windows=WindowKeys(4096, has_layer_types=True, first_full=62),
)
_MTP_RULES = (
    NameRule("model.layers.{}.enorm", ("blocks.{}.embedding_norm",)),
    NameRule("model.layers.{}.hnorm", ("blocks.{}.hidden_norm",)),
    NameRule("model.layers.{}.eh_proj", ("blocks.{}.projection",)),
    NameRule("model.layers.{}.shared_head.norm", ("blocks.{}.final_norm",)),
)


def _rules_of(mixture: MixtureFiles, gated: bool) -> Iterator[Rule]:
    """Yield the name rules of the mixture of a row of the table of families."""
    for hf_name, *native_names in mixture.layers:
        yield NameRule(hf_name, tuple(native_names))
    experts = "blocks.{}.feed_forward.experts"
    first = f"{experts}.{'gate_up' if gated else 'up'}"
    if mixture.gates == "none":
        yield StackRule(mixture.gate_up, first)
        yield StackRule((mixture.down,), f"{experts}.down")
        return
    order = mixture.transposed, mixture.suffixes
    yield PackedRule(mixture.gate_up[0], first, mixture.gates if gated else "none", *order)
    yield PackedRule(mixture.down, f"{experts}.down", "none", *order)


def _of_row(family: FamilyName, row: ModelType) -> HuggingFaceArchitecture:
    """Return the architecture of a row of the table of families, with the names of Llama by default."""
    defaults, mixture = FAMILIES[family].defaults, row.mixture
    gated = ACTIVATIONS[defaults.activation].gated
    experts = {_EXPERT_FIELDS.get(key, key): value for key, value in FAMILIES[family].experts.items()}
    layer_rules = (
        NameRule(
            hf_name,
            tuple(native_names),
            interleaved=row.fused_qkv and len(native_names) == _QUERY_KEY_VALUE,
        )
        for hf_name, *native_names in row.layers
    )
    head_norms = (
        HeadRule(name, f"blocks.{{}}.attention.{kind}_norm")
        for kind, name in zip(("query", "key"), row.head_norms, strict=False)
    )
    required_values = (
        RequiredConfigValue(key, (value,), default) for key, (value, default) in row.required_values.items()
    )
    return HuggingFaceArchitecture(
        name=row.architecture,
        model_type=row.model_type,
        family=family,
        rules=(
            *_LLAMA_RULES,
            *_NORM_RULES,
            *(_LATENT_RULES if row.latent else ()),
            *layer_rules,
            *head_norms,
            *(() if mixture is None else _rules_of(mixture, gated)),
            *(_MTP_RULES if MTP_LAYERS in row.constants else ()),
        ),
        prefix=row.prefix,
        buffers=row.buffers,
        required_values=(
            *required_values,
            *(() if _is_partial(family, row.model_type) else (_WHOLE_ROTARY,)),
        ),
        quantization=row.quantization,
        rope_parameters=row.rope_parameters,
        grouped=row.grouped,
        interleaved=row.interleaved,
        sizes=_sizes(*row.sizes),
        epsilon=row.epsilon,
        tied=row.tied,
        key_value_heads=row.key_value_heads,
        head_size=row.head_size,
        rope_base=row.rope_base,
        hidden_act=row.activation,
        gated=gated,
        attention_biases=row.attention_biases,
        keys=row.keys,
        constants={**_UNCUT, **row.constants},
        windows=row.windows,
        constant_fields={**(experts if mixture is not None else {}), **row.constant_fields},
        mixture={} if mixture is None else mixture.sizes,
        normalizes=None if mixture is None else mixture.normalizes,
        scale=None if mixture is None else mixture.scale,
        shared_width=None if mixture is None else mixture.shared_width,
        local_rope=row.local_rope,
        rope_local_base=row.rope_local_base,
        latent=row.latent,
        group_method=None if mixture is None else mixture.group_method,
    )


_EXPERT_FIELDS = {key: field for field, key in EXPERT_KEYS.items()}
"""Field of a ModelShape by the key of [model.experts]."""


def _reward_variant(architecture: HuggingFaceArchitecture, name: str) -> HuggingFaceArchitecture:
    """Return the reward-model variant of an architecture."""
    rules = tuple(
        NameRule("score", ("score",)) if isinstance(rule, NameRule) and "head" in rule.native_names else rule
        for rule in architecture.rules
    )
    return replace(architecture, name=name, rules=rules, head="scalar")


_SCORES = "ForSequenceClassification"

_ROWS = {
    row.architecture: (_of_row(family, row), row.reward_architecture)
    for family, description in FAMILIES.items()
    for row in description.model_types
}

SCORED: Mapping[str, HuggingFaceArchitecture] = MappingProxyType(
    {
        of.name: _reward_variant(of, name)
        for of, name in (
            *(
                (of, f"{of.name.removesuffix('LMHeadModel').removesuffix('ForCausalLM')}{_SCORES}")
                for of in (_GPT2, _LLAMA, _ARCEE, _MISTRAL, _MINISTRAL, _QWEN2, _QWEN3, _MIXTRAL, _QWEN3_MOE)
            ),
            *((of, name) for of, name in _ROWS.values() if name),
        )
    }
)
"""Reward-model variant of each architecture that has one, by the name of the language model."""

ARCHITECTURES: Mapping[str, HuggingFaceArchitecture] = MappingProxyType(
    {
        each.name: each
        for each in (
            *(_GPT2, _LLAMA, _ARCEE, _MISTRAL, _MINISTRAL, _QWEN2, _QWEN3),
            *(_MIXTRAL, _QWEN3_MOE, _OLMOE, _DOTS1),
            *(of for of, _ in _ROWS.values()),
            *SCORED.values(),
        )
    }
)
