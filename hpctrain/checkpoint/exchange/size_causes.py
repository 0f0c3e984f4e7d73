"""Keys of a config.json that contradict the tensors of its folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from hpctrain.checkpoint.exchange.hugging_face.architectures import HuggingFaceArchitecture
from hpctrain.checkpoint.exchange.hugging_face.config_keys import EXPERT_COUNT_KEYS, Config
from hpctrain.checkpoint.exchange.hugging_face.tensor_names import Counterpart
from hpctrain.checkpoint.exchange.safetensors_folder import TensorInfo
from hpctrain.checkpoint.tensor_ranges import Index
from hpctrain.errors import HpctrainError
from hpctrain.model.shape import ModelShape

_LAYER = re.compile(r"\b(?:layers|h)\.(\d+)\.")
_HEAD_KEYS = ("head_dim", "num_attention_heads")
_EXPERT = re.compile(r"\bexperts\.(\d+)\.")
_LARGEST_SEARCH = 1_000_000
"""Number of expected tensors, over all changes of a config.json, up to which changes are tried."""
_SIZES_TRIED = 4
"""Number of sizes in the files that are tried as the value of a key."""


def size_text(key: str, value: object, config: Config) -> str:
    """Return a key with its value in words, which say if it is a default that the config.json lacks."""
    names = EXPERT_COUNT_KEYS if key in EXPERT_COUNT_KEYS else (key,)
    is_in_config = any(name in config and config[name] == value for name in names)
    return f"{key} = {value}" if is_in_config else f"{key} is missing and {value} by default"


def likely_cause(
    config: Config,
    architecture: HuggingFaceArchitecture,
    shape: ModelShape,
    expected: Collection[Counterpart],
    stored: Mapping[str, TensorInfo],
    fits: Callable[[Config], bool],
) -> str:
    """Return the keys of a config.json that contradict its folder, as the end of a message; "" if unknown.

    Each of these keys fits the tensors with another value. If there is no such key, the message names the
    first key on which a wrong size depends.

    Args:
        config: Content of the config.json.
        architecture: Architecture that it names.
        shape: Shape that it describes.
        expected: Tensors of the model that it describes.
        stored: Tensors in the folder.
        fits: Function that returns True for a config.json whose tensors are those of the folder. It may raise
            HpctrainError.
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
    if keys := _contradicting_keys(config, architecture, shape, expected, stored, fits):
        return f", where {' or '.join(keys)}"
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
    return ""


def _contradicting_keys(
    config: Config,
    architecture: HuggingFaceArchitecture,
    shape: ModelShape,
    expected: Collection[Counterpart],
    stored: Mapping[str, TensorInfo],
    fits: Callable[[Config], bool],
) -> list[str]:
    """Return the keys that fit the tensors with another value, with their values and the fitting ones."""
    files = architecture.files
    values: dict[str, Any] = {
        **dict(files.config_sizes.values()),
        **{key.name: key.default for key in files.keys},
        "tie_word_embeddings": files.tied,
        **config,
    }
    sizes = {tensor.name: tensor.shape for tensor in expected}
    changes = [
        (key, other)
        for key in sorted(values, key=lambda key: not isinstance(values[key], bool))
        if not key.endswith("_id")
        for other in _other_values(values[key], sizes, stored, shape.heads)
    ]
    keys: dict[str, str] = {}
    for key, other in changes[: _LARGEST_SEARCH // len(sizes)]:
        with suppress(HpctrainError):
            if key not in keys and fits({**config, key: other}):
                keys[key] = f"{size_text(key, values[key], config)} ({other} would fit)"
    return list(keys.values())


def _other_values(
    value: Any, expected: Mapping[str, Index], stored: Mapping[str, TensorInfo], heads: int
) -> Iterator[object]:
    """Yield values of a key by which tensors may get the names or the sizes that they have in the files.

    Args:
        value: Value in the config.json, or its default.
        expected: Shapes of the tensors of the model that the config.json describes.
        stored: Tensors in the folder.
        heads: Number of attention heads, since the key may be a size of each head.
    """
    layers = {int(found[1]): name for name in stored if (found := _LAYER.search(name))}
    mixtures = {int(found[1]) for name in stored if "expert" in name and (found := _LAYER.search(name))}
    dense_layers = sorted(layers.keys() - mixtures)
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, list):
        yield from ([], dense_layers)
    elif value is None or isinstance(value, int):
        pairs = {
            (size, stored_size): None
            for name, shape in expected.items()
            if name in stored and len(stored[name].shape) == len(shape)
            for size, stored_size in zip(shape, stored[name].shape, strict=True)
            if 0 < size != stored_size
        }
        unknown = {size: None for name, info in stored.items() if name not in expected for size in info.shape}
        others: list[object] = [*[size for _, size in pairs][:_SIZES_TRIED], *[*unknown][:_SIZES_TRIED]]
        if value is not None:
            for size, stored_size in [*pairs][:_SIZES_TRIED]:
                difference = stored_size - size
                results = (value * stored_size / size, value + difference, value + difference / heads)
                others += [int(result) for result in results if result == int(result)]
            others += [0, 1, 2, value - 1, value + 1, len(dense_layers), None]
        yield from (other for other in dict.fromkeys(others) if other != value)


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
