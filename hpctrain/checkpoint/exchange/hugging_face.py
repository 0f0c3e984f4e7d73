"""GPT-2 and Llama as Hugging Face's `transformers` stores them: the names of tensors, and config.json.

Their linear layers of GPT-2 hold [in, out] where ours hold [out, in], with query, key and value side by
side in one; those of Llama, and the rotation of its halves, are as ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.deck.presets import Family
from hpctrain.errors import HpctrainError
from hpctrain.model.shape import ModelShape

Index = tuple[int, ...]
Config = Mapping[str, Any]


@dataclass(frozen=True)
class NameRule:
    """A layer of theirs and the layers of ours that it holds, below each other; {} is the block's number.

    Weights are `<name>.weight`, biases `<name>.bias`.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


RULES: Mapping[Family, tuple[NameRule, ...]] = {
    "gpt2": (
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
    ),
    "llama": (
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
    ),
}

PREFIX: Mapping[Family, str] = {"gpt2": "transformer.", "llama": "model."}
"""Before all names but the head's; a file that was saved without the head may lack it."""

BUFFERS: Mapping[Family, str] = {
    "gpt2": r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
    "llama": r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
}
"""Names of what older files hold besides parameters: masks and frequencies, which follow from the sizes."""

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class TensorPart:
    """One of our tensors within one of theirs: rows `first` to `first + shape[0]` in our orientation."""

    name: str
    shape: Index
    first: int


@dataclass(frozen=True)
class Counterpart:
    """One tensor of theirs, of `shape` in the file, and ours of which it is made."""

    name: str
    shape: Index
    transposed: bool
    parts: tuple[TensorPart, ...]


def counterparts(family: Family, ours: Mapping[str, Index]) -> list[Counterpart]:
    """What holds our tensors, given with their global shapes; the same order, each of theirs once."""
    by_layer = {layer: rule for rule in RULES[family] for layer in rule.ours}
    held: dict[str, Counterpart] = {}
    for name in ours:
        layer, _, kind = name.rpartition(".")
        block = re.fullmatch(r"blocks\.(\d+)\.(.*)", layer)
        number = block[1] if block else ""
        rule = by_layer[f"blocks.{{}}.{block[2]}" if block else layer]
        theirs = f"{rule.theirs.format(number)}.{kind}"
        if theirs in held:
            continue
        parts, rows = [], 0
        for other in rule.ours:
            full_name = f"{other.format(number)}.{kind}"
            parts.append(TensorPart(full_name, ours[full_name], rows))
            rows += ours[full_name][0]
        shape = (rows, *parts[0].shape[1:])
        transposed = rule.transposed and len(shape) == 2
        held[theirs] = Counterpart(theirs, shape[::-1] if transposed else shape, transposed, tuple(parts))
    return list(held.values())


ARCHITECTURES: Mapping[str, Family] = {"GPT2LMHeadModel": "gpt2", "LlamaForCausalLM": "llama"}

# What configs may say of a model's function and ours cannot vary: key, values that are ours, the default.
_FIXED: Mapping[Family, tuple[tuple[str, tuple[object, ...], object], ...]] = {
    "gpt2": (
        ("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new"),
        ("scale_attn_weights", (True,), True),
        ("scale_attn_by_inverse_layer_idx", (False,), False),
        ("add_cross_attention", (False,), False),
        ("quantization_config", (None,), None),
    ),
    "llama": (
        ("hidden_act", ("silu", "swish"), "silu"),
        ("attention_bias", (False,), False),
        ("mlp_bias", (False,), False),
        ("sliding_window", (None,), None),
        ("partial_rotary_factor", (None, 1, 1.0), None),
        ("quantization_config", (None,), None),
    ),
}
# Their names of our sizes, and the defaults where a config does not say.
_SIZES: Mapping[Family, Mapping[str, tuple[str, int]]] = {
    "gpt2": {
        "vocabulary": ("vocab_size", 50257),
        "sequence": ("n_positions", 1024),
        "hidden": ("n_embd", 768),
        "layers": ("n_layer", 12),
        "heads": ("n_head", 12),
    },
    "llama": {
        "vocabulary": ("vocab_size", 32000),
        "sequence": ("max_position_embeddings", 2048),
        "hidden": ("hidden_size", 4096),
        "layers": ("num_hidden_layers", 32),
        "heads": ("num_attention_heads", 32),
        "mlp": ("intermediate_size", 11008),
    },
}
_LARGEST = 10_000_000


def shape_of(config: Config, where: str) -> ModelShape:
    """The shape that a config.json describes; `where` names it in messages.

    HpctrainError for an architecture that is not one of ours, and for everything in the config that our
    models cannot express.
    """
    family = _family(config, where)
    problems = [
        f"{where}: {key} = {config[key]!r}: the {family} models of hpctrain have {default!r} alone"
        for key, accepted, default in _FIXED[family]
        if key in config and config[key] not in accepted
    ]
    named = _SIZES[family].items()
    sizes: dict[str, Any] = {
        own: _size(config, key, default, where, problems) for own, (key, default) in named
    }
    # In their files null stands for what follows from other sizes.
    if family == "gpt2":
        sizes["mlp"] = _size(config, "n_inner", 4 * sizes["hidden"], where, problems)
        sizes["key_value_heads"] = sizes["heads"]
        epsilon, base = _number(config, "layer_norm_epsilon", 1e-5, where, problems), 10_000.0
    else:
        sizes["key_value_heads"] = _size(config, "num_key_value_heads", sizes["heads"], where, problems)
        epsilon = _number(config, "rms_norm_eps", 1e-6, where, problems)
        base = _rotary_base(config, where, problems)
        if config.get("head_dim") is not None:
            sizes["head_size"] = _size(config, "head_dim", 1, where, problems)
    tied = config.get("tie_word_embeddings", family == "gpt2")
    if not isinstance(tied, bool):
        problems.append(f"{where}: tie_word_embeddings = {tied!r}: must be true or false")
    if not problems:
        problems += _mismatches(family, sizes, where)
    if problems:
        raise HpctrainError(problems)
    settled: dict[str, Any] = {**sizes, "tied": tied}
    return ModelShape(family=family, norm_epsilon=epsilon, rope_base=base, **settled)


def config_of(shape: ModelShape, dtype: str, end_of_document: int | None) -> dict[str, Any]:
    """The config.json of a shape whose tensors are of a type such as "float32".

    HpctrainError where `transformers` has no such model. Both the newer and the older names of some keys
    are there, so that its versions 4 and 5 read the same.
    """
    shared = {
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        "initializer_range": shape.initial_std,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": dtype,
        "dtype": dtype,
        "use_cache": True,
    }
    sizes = {key: getattr(shape, own) for own, (key, _) in _SIZES[shape.family].items()}
    if shape.query_key_norm != "none":
        raise HpctrainError(
            f'model.query_key_norm = "{shape.query_key_norm}": the Llama of transformers has no norms of '
            "queries and keys, so this model cannot be exported"
        )
    fixed = {key: default for key, _, default in _FIXED[shape.family] if default is not None}
    if shape.family == "gpt2":
        if shape.key_value_heads != shape.heads:
            raise HpctrainError(
                f"model.key_value_heads = {shape.key_value_heads}: the GPT-2 of transformers has as many "
                f"heads of keys and values as of queries ({shape.heads}), so this model cannot be exported"
            )
        own: dict[str, Any] = {
            "n_inner": shape.mlp,
            "layer_norm_epsilon": shape.norm_epsilon,
            "embd_pdrop": shape.dropout,
            "resid_pdrop": shape.dropout,
            "attn_pdrop": 0.0,
        }
    else:
        own = {
            "num_key_value_heads": shape.key_value_heads,
            "head_dim": shape.head_size,
            "rms_norm_eps": shape.norm_epsilon,
            "rope_theta": shape.rope_base,
            "rope_parameters": {"rope_theta": shape.rope_base, "rope_type": "default"},
            "attention_dropout": 0.0,
        }
    architectures = [name for name, family in ARCHITECTURES.items() if family == shape.family]
    named = {"architectures": architectures, "model_type": shape.family}
    return named | sizes | own | fixed | shared


def _family(config: Config, where: str) -> Family:
    named = config.get("architectures")
    if named is None:
        # Older files name the type alone.
        named = [name for name, family in ARCHITECTURES.items() if config.get("model_type") == family]
    known = [name for name in ARCHITECTURES if named == [name]]
    if not known:
        named = f"architectures = {config.get('architectures')!r}, model_type = {config.get('model_type')!r}"
        raise HpctrainError(f"{where}: {named}: hpctrain has {' and '.join(ARCHITECTURES)}")
    return ARCHITECTURES[known[0]]


def _size(config: Config, key: str, default: int, where: str, problems: list[str]) -> int:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
        problems.append(f"{where}: {key} = {value!r}: must be a whole number from 1 to {_LARGEST}")
        return default
    return value


def _number(config: Config, key: str, default: float, where: str, problems: list[str]) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        problems.append(f"{where}: {key} = {value!r}: must be a number above 0")
        return default
    return float(value)


def _rotary_base(config: Config, where: str, problems: list[str]) -> float:
    """The base of rotary angles: beside rope_scaling in older files, in rope_parameters in newer ones."""
    base = _number(config, "rope_theta", 10_000.0, where, problems)
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if rope is None:
            continue
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
        if kind != "default" or rope.get("partial_rotary_factor", 1) != 1:
            problems.append(f"{where}: {key} = {rope!r}: rotary positions of hpctrain are not scaled")
        else:
            base = _number(rope, "rope_theta", base, f"{where}: {key}", problems)
    return base


def _mismatches(family: Family, sizes: Mapping[str, int], where: str) -> list[str]:
    """Sizes that no model can have together, or none of ours."""
    names = {own: key for own, (key, _) in _SIZES[family].items()}
    hidden, heads, shared = sizes["hidden"], sizes["heads"], sizes["key_value_heads"]
    size = sizes.get("head_size")
    if size is None and hidden % heads:
        return [f"{where}: {names['heads']} = {heads}: must divide {names['hidden']} = {hidden}"]
    if heads % shared:
        return [f"{where}: num_key_value_heads = {shared}: must divide {names['heads']} = {heads}"]
    if family == "llama" and size is not None and size % 2:
        return [f"{where}: head_dim = {size}: must be even"]
    if family == "llama" and size is None and hidden // heads % 2:
        return [f"{where}: {names['heads']} = {heads}: must leave an even size of each head"]
    return []
