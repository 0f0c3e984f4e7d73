"""Keys of a config.json that contradict the tensors of its folder."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

from hpctrain.checkpoint.exchange.hugging_face.architectures import HEAD, HuggingFaceArchitecture
from hpctrain.checkpoint.exchange.hugging_face.config_keys import EXPERT_COUNT_KEYS, Config
from hpctrain.checkpoint.exchange.hugging_face.tensor_names import Counterpart
from hpctrain.checkpoint.exchange.safetensors_folder import TensorInfo
from hpctrain.model.shape import ModelShape

_LAYER = re.compile(r"\b(?:layers|h)\.(\d+)\.")
_HEAD_KEYS = ("head_dim", "num_attention_heads")
_EXPERT = re.compile(r"\bexperts\.(\d+)\.")


_FLAGGED_TENSORS: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "attention_bias": re.compile(r"att.*\.bias$"),
        "mlp_bias": re.compile(r"mlp.*\.bias$"),
        "query_key_norm": re.compile(r"(q|k)_(layer)?norm"),
        "parallel_residual": re.compile(r"post_attention_layernorm\."),
        "tied": re.compile(r"^(lm_head|embed_out)\.weight$"),
    }
)
"""Names in files of the tensors that a key of [model] switches on or off."""


def size_text(key: str, value: int, config: Config) -> str:
    """Return a key with its size in words, which say if it is a default that the config.json lacks."""
    names = EXPERT_COUNT_KEYS if key in EXPERT_COUNT_KEYS else (key,)
    is_in_config = any(config.get(name) is not None for name in names)
    return f"{key} = {value}" if is_in_config else f"{key} is missing and {value} by default"


def likely_cause(
    config: Config,
    architecture: HuggingFaceArchitecture,
    shape: ModelShape,
    expected: Collection[Counterpart],
    stored: Mapping[str, TensorInfo],
) -> str:
    """Return the key of a config.json that contradicts its folder, as the end of a message; "" if unknown.

    Args:
        config: Content of the config.json.
        architecture: Architecture that it names.
        shape: Shape that it describes.
        expected: Tensors of the model that it describes.
        stored: Tensors in the folder.
    """
    files = architecture.files
    counts = [(_LAYER, files.config_sizes["layers"][0], shape.layers, shape.layers + shape.mtp_layers)]
    if files.mixture is not None and shape.experts is not None:
        count = shape.experts.count
        counts.append((_EXPERT, files.mixture.sizes["count"][0], count, count))
    for pattern, key, size, expected_count in counts:
        numbers = {int(found[1]) for tensor in stored if (found := pattern.search(tensor))}
        if numbers and len(numbers) != expected_count:
            return f", where {size_text(key, size, config)}, but the files have {len(numbers)}"
    for tensor in expected:
        info = stored.get(tensor.name)
        if info is None or len(info.shape) != len(tensor.shape) or info.shape == tensor.shape:
            continue
        pairs = zip(tensor.shape, info.shape, strict=True)
        different = {size for size, stored_size in pairs if size != stored_size}
        for key, value, result in _sizes(tensor.parts[0].dataset, architecture, shape):
            if result in different:
                others = [each for each in _HEAD_KEYS if each != key and config.get(each) is not None]
                further = others[:1] if key in {"num_attention_heads", "num_key_value_heads"} else []
                sizes = [size_text(key, value, config), *(f"{each} = {config[each]!r}" for each in further)]
                return f", where {' and '.join(sizes)}"
        return ""
    different_names = stored.keys() ^ {tensor.name for tensor in expected}
    different_names -= {HEAD} if shape.tied else set()
    return _switch(config, architecture, shape, different_names) if different_names else ""


def _switch(
    config: Config, architecture: HuggingFaceArchitecture, shape: ModelShape, tensors: Collection[str]
) -> str:
    """Return the key that explains all tensors which only the files or only the model have; "" if unknown."""
    keys = {key.deck_key: key.name for key in architecture.files.keys} | {"tied": "tie_word_embeddings"}
    if len(architecture.files.attention_biases) > 1:
        keys.setdefault("attention_bias", "attention_bias")
    for deck_key, pattern in _FLAGGED_TENSORS.items():
        key = keys.get(deck_key, "")
        if (key in config or deck_key == "tied") and all(pattern.search(name) for name in tensors):
            value = config.get(key)
            return f", where {size_text(key, shape.tied if value is None else value, config)}"
    return ""


def _sizes(
    dataset: str, architecture: HuggingFaceArchitecture, shape: ModelShape
) -> Iterator[tuple[str, int, int]]:
    """Yield keys on which the shape of a tensor depends, their values, and the extents that they give."""
    files, layer = architecture.files, dataset.rpartition(".")[0].rpartition(".")[2]
    keys = {name: key for name, (key, _) in files.config_sizes.items()}
    if layer in {"tokens", "head"}:
        yield keys["vocabulary"], shape.vocabulary, shape.vocabulary
    if dataset.endswith(".sinks"):
        yield keys["heads"], shape.heads, shape.heads
    if layer == "positions":
        yield keys["sequence"], shape.sequence, shape.sequence
    if layer in {"key", "value"} and not files.latent:
        yield "num_key_value_heads", shape.key_value_heads, shape.key_value_heads * shape.head_size
    if layer in {"query", "key", "value", "output"}:
        yield keys["heads"], shape.heads, shape.heads * shape.head_size
        fused = (shape.heads + 2 * shape.key_value_heads) * shape.head_size
        if files.grouped:
            yield "num_key_value_heads", shape.key_value_heads, fused
        yield keys["heads"], shape.heads, fused
    if "feed_forward" in dataset:
        if files.mixture is not None and shape.experts is not None:
            for name in ("count", "mlp"):
                if name in files.mixture.sizes:
                    size = getattr(shape.experts, name)
                    yield files.mixture.sizes[name][0], size, size
        yield keys["mlp"], shape.mlp, shape.mlp
        yield keys["mlp"], shape.mlp, 2 * shape.mlp  # files that store the gate and the up projection as one
    if shape.latent is not None and "attention" in dataset:
        for name, (key, _) in files.latent.items():
            if (size := getattr(shape.latent, name, None)) is not None:
                yield key, size, size + (shape.latent.rotary_size if name == "key_value_rank" else 0)
    yield keys["hidden"], shape.hidden, shape.hidden
