"""Architectures of Hugging Face's `transformers` that can be imported and exported: tensors and config.json.

Each is a row of the table of families, from which the names of its tensors follow. Native weights
are [out, in]. GPT-2's files have [in, out], with query, key and value concatenated in one layer. Files of
Llama and of most later architectures have the same layers as native models, and they rotate halves of a head,
too. Most files have one matrix for each expert, while a native tensor holds those of all experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from hpctrain.checkpoint.exchange.hugging_face.tensor_names import (
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
from hpctrain.deck.families.computation_keys import ROPE_TABLES
from hpctrain.deck.family import ROPE_KEYS, MixtureFiles, ModelType
from hpctrain.deck.sections.rope_scaling import rotated_features
from hpctrain.errors import HpctrainError
from hpctrain.model.shape import Head, ModelShape
from hpctrain.text import either

HEAD = "lm_head.weight"

MTP_LAYERS = "num_nextn_predict_layers"
"""Key of a config with the number of modules of multi-token prediction."""

_QUERY_KEY_VALUE = 3
"""Number of native layers that a fused layer of queries, keys and values holds."""


@dataclass(frozen=True)
class HuggingFaceArchitecture:
    """Language model or reward model of `transformers`, described by a row of the table of families.

    Attributes:
        family: Family of models here that compute the same.
        files: Keys of its config.json and names of its tensors.
        head: Kind of the output layer.
    """

    family: FamilyName
    files: ModelType
    head: Head = "vocabulary"

    @property
    def name(self) -> str:
        """Name of the class in `transformers`, such as "LlamaForCausalLM"."""
        return self.files.architecture if self.head == "vocabulary" else self.files.reward_architecture

    @property
    def model_type(self) -> str:
        """Value of `model_type` in a config.json."""
        return self.files.model_type

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """Name rules of its tensors. A later rule for the same native layer replaces an earlier one."""
        return tuple(_rules(self.files, self.gated))

    @property
    def gated(self) -> bool:
        """True if feed-forward layers have a gate."""
        gated = self.files.gated
        return ACTIVATIONS[FAMILIES[self.family].defaults.activation].gated if gated is None else gated

    @property
    def constant_fields(self) -> Mapping[str, Any]:
        """Fields of a ModelShape that have the same values in all its models, beside family defaults."""
        return self.files.constant_fields

    @property
    def constant_expert_keys(self) -> Mapping[str, Any]:
        """Keys of [model.experts] that have the same values in all its models."""
        mixture = self.files.mixture
        return {} if mixture is None else {**FAMILIES[self.family].experts, **mixture.constants}

    def choices(self, hidden: int) -> dict[str, Any]:
        """Return keys of [model] whose values all models of a width share, and config.json does not have."""
        files = self.files
        values = {**family_values(self.family, hidden), "attention_scale": None, **self.constant_fields}
        expressed = {"tied", "activation", "attention_bias", *(key.deck_key for key in files.keys)}
        if self.has_rotary_fraction:
            expressed.add("rotary_fraction")
        if files.windows is not None:
            expressed |= {"windows", "rotation_pattern"} if files.windows.rotate else {"windows"}
        if files.latent:
            expressed.add("attention_scale")
        names = (*CHOICES, "embedding_multiplier", "attention_scale")
        return {name: values[name] for name in names if name not in expressed}

    @property
    def has_mtp(self) -> bool:
        """True if its files may have modules of multi-token prediction."""
        return MTP_LAYERS in self.files.constants

    @property
    def computation_keys(self) -> frozenset[str]:
        """Keys of a config.json that this architecture has, among those that change what models compute."""
        files, mixture = self.files, self.files.mixture
        keys = {*files.required_values, *files.constants}
        for key in files.keys:
            keys |= {key.name, key.default[0]} if key.form == "layers" else {key.name}
        if self.rotary:
            keys.update(ROPE_TABLES)
        if self.has_rotary_fraction:
            keys.update(files.rope_keys, ROPE_KEYS)
        if files.local_rope:
            keys.add("rope_local_base_freq")
        if files.windows is not None:
            keys.add("sliding_window")
        if files.layered_architecture or (files.windows is not None and files.windows.has_layer_types):
            keys.add("layer_types")
        if mixture is not None and mixture.scale is not None:
            keys.add("routed_scaling_factor")
        return frozenset(keys)

    @property
    def rotary(self) -> bool:
        """True if it rotates queries and keys."""
        return FAMILIES[self.family].defaults.positions == "rotary"

    @property
    def has_rotary_fraction(self) -> bool:
        """True if config.json has the share of rotated features."""
        return FAMILIES[self.family].defaults.rotary_fraction < 1 or self.files.has_rotary_fraction

    def head_order(self, shape: ModelShape) -> LayerOrders | None:
        """Return the order of the features of heads in files; None for models without rotation."""
        if not self.rotary:
            return None
        if shape.latent is not None:
            return LatentOrder(shape.head_size, shape.latent.rotary_size, shape.latent.value_size)
        rotated = rotated_features(shape.head_size, shape.rotary_fraction)
        return HeadOrder(shape.head_size, rotated, self.files.interleaved)

    def empty_tensors(self, shape: ModelShape) -> Iterator[Counterpart]:
        """Yield the tensors without elements in files of a model without shared experts.

        `transformers` has matrices of the width 0 for shared experts if their number is 0.
        """
        mixture = self.files.mixture
        if mixture is None or "shared" not in mixture.sizes or (shape.experts and shape.experts.shared):
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
        default_name, native = self.files.activation[1], FAMILIES[self.family].defaults.activation
        if not ACTIVATIONS[native].function.hidden_act:
            return {native: default_name}
        hf_names = {
            name: default_name if default_name in each.function.hidden_act else each.function.hidden_act[0]
            for name, each in ACTIVATIONS.items()
            if each.gated == self.gated and each.function.hidden_act
        }
        return {
            name: hf_name
            for name, hf_name in hf_names.items()
            if hf_name not in self.files.activation_aliases
        }

    @property
    def choice_is_biased(self) -> bool:
        """True if routers add a bias to the scores only for choosing experts (`e_score_correction_bias`)."""
        return self.constant_expert_keys.get("balance") == "bias"


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
    NameRule("score", ("score",)),
    NameRule("model.layers.{}.self_attn.q_norm", ("blocks.{}.attention.query_norm",)),
    NameRule("model.layers.{}.self_attn.k_norm", ("blocks.{}.attention.key_norm",)),
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

_MTP_RULES = (
    NameRule("model.layers.{}.enorm", ("blocks.{}.embedding_norm",)),
    NameRule("model.layers.{}.hnorm", ("blocks.{}.hidden_norm",)),
    NameRule("model.layers.{}.eh_proj", ("blocks.{}.projection",)),
    NameRule("model.layers.{}.shared_head.norm", ("blocks.{}.final_norm",)),
)


def _rules(files: ModelType, gated: bool) -> Iterator[Rule]:
    """Yield the name rules of a model type: those of Llama, and those in which it differs."""
    yield from _LLAMA_RULES
    if files.latent:
        yield from _LATENT_RULES
    for hf_name, *native_names in files.layers:
        yield NameRule(
            hf_name,
            tuple(native_names),
            transposed=files.transposed and native_names[0].startswith("blocks."),
            interleaved=files.fused_qkv and len(native_names) == _QUERY_KEY_VALUE,
        )
    for kind, name in zip(("query", "key"), files.head_norms, strict=False):
        yield HeadRule(name, f"blocks.{{}}.attention.{kind}_norm")
    if files.mixture is not None:
        yield from _mixture_rules(files.mixture, gated)
    if MTP_LAYERS in files.constants:
        yield from _MTP_RULES


def _mixture_rules(mixture: MixtureFiles, gated: bool) -> Iterator[Rule]:
    """Yield the name rules of mixtures."""
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


LANGUAGE_MODELS: Sequence[HuggingFaceArchitecture] = tuple(
    HuggingFaceArchitecture(family, files)
    for family, description in FAMILIES.items()
    for files in description.model_types
)
"""Architectures of language models, in the order of the table of families."""

REWARD_ARCHITECTURES: Mapping[str, HuggingFaceArchitecture] = MappingProxyType(
    {each.name: replace(each, head="scalar") for each in LANGUAGE_MODELS if each.files.reward_architecture}
)
"""Reward-model variant of each architecture that has one, by the name of the language model."""

ARCHITECTURES: Mapping[str, HuggingFaceArchitecture] = MappingProxyType(
    {each.name: each for each in (*LANGUAGE_MODELS, *REWARD_ARCHITECTURES.values())}
)
"""Language models and reward models by their names."""


def architecture_of(config: Mapping[str, Any], where: str) -> HuggingFaceArchitecture:
    """Return the architecture that a config.json names.

    Args:
        config: Content of the config.json.
        where: Its name in messages.

    Raises:
        HpctrainError: The architecture is not supported, or as in `native_architecture`.
    """
    architecture = native_architecture(config, where)
    if architecture is None:
        value = f"architectures = {config.get('architectures')!r}, model_type = {config.get('model_type')!r}"
        raise HpctrainError(f"{where}: {value}: unsupported architecture; expected {either(ARCHITECTURES)}")
    return architecture


def _is_model_type(value: object) -> bool:
    """Return True for a `model_type` of `transformers`, and for a value that is no string.

    Files with another string exist, such as "kimi_k2" for DeepSeek-V3, and come with code of their own.
    """
    if not isinstance(value, str) or value in {each.model_type for each in LANGUAGE_MODELS}:
        return True
    with suppress(ImportError):
        from transformers import CONFIG_MAPPING

        return value in CONFIG_MAPPING
    return False


def native_architecture(config: Mapping[str, Any], where: str) -> HuggingFaceArchitecture | None:
    """Return the architecture that a config.json names; None if it is none of `ARCHITECTURES`.

    Args:
        config: Content of the config.json.
        where: Its name in messages.

    Raises:
        HpctrainError: `architectures` is not a list, or contradicts `model_type`.
    """
    names = config.get("architectures")
    if names is None:
        # Older files have only the model type.
        names = [each.name for each in LANGUAGE_MODELS if config.get("model_type") == each.model_type]
    if not isinstance(names, list):
        message = 'must be a list with the name of a class, such as ["LlamaForCausalLM"]'
        raise HpctrainError(f"{where}: architectures = {names!r}: {message}")
    known = next((each for name, each in ARCHITECTURES.items() if names == [name]), None)
    if known is None:
        return None
    model_type = config.get("model_type")
    if model_type not in (None, known.model_type) and _is_model_type(model_type):
        value = f"model_type = {model_type!r}"
        raise HpctrainError(f"{where}: {value}: contradicts architectures = {names!r}")
    layered = known.files.layered_architecture
    if "layer_types" in config and layered:
        return ARCHITECTURES[layered] if known.head == "vocabulary" else REWARD_ARCHITECTURES[layered]
    return known
