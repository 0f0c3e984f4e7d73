"""Keys of a config.json that contradict the tensors of its folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from fractions import Fraction
from typing import Any

from hpctrain.checkpoint.exchange.hugging_face.architectures import HuggingFaceArchitecture
from hpctrain.checkpoint.exchange.hugging_face.config_keys import Config, size_text, written_key
from hpctrain.checkpoint.tensor_ranges import Index
from hpctrain.errors import HpctrainError
from hpctrain.model.shape import ModelShape

_LAYER = re.compile(r"\b(?:layers|h)\.(\d+)\.")
_EXPERT = re.compile(r"\bexperts\.(\d+)\.")
_LARGEST_SEARCH = 300_000
"""Number of expected tensors, over all changes of a config.json, up to which changes are tried."""
_SIZES_TRIED = 4
"""Number of sizes in the files that are tried as the value of a key."""
_EXPERT_SIZES = ("count", "mlp", "shared", "dense_first", "every")
"""Keys of [model.experts] on which tensors depend."""
_FACTORS = (Fraction(2), Fraction(3), Fraction(4))
"""Factors by which the value of a key may be too large or too small."""
_WRONG_KEYS = 3
"""Largest number of wrong keys that are found together."""

Differences = dict[str, tuple[Index | None, Index | None]]
"""Shapes of tensors in the model of a config.json and in its folder, by name, where they differ.

The shape is None where a tensor is missing. Both are equal if only the type is wrong.
"""


def layer_number(tensor: str) -> int:
    """Return the number of the layer that has a tensor of a folder; 0 if none has it."""
    found = _LAYER.search(tensor)
    return int(found[1]) if found else 0


def likely_cause(
    config: Config,
    architecture: HuggingFaceArchitecture,
    shape: ModelShape,
    names: tuple[Collection[str], Collection[str]],
    compare: Callable[[Config, int | None], Differences],
) -> tuple[str, str]:
    """Return a tensor that differs, and the wrong keys of a config.json as the end of a message about it.

    Another value of these keys fits this tensor, and leaves fewer tensors that differ. The end is "" if there
    are no such keys, as for damaged tensors.

    Args:
        config: Content of the config.json.
        architecture: Architecture that it names.
        shape: Shape that it describes.
        names: Names of the tensors of the model that it describes, and of those in the folder.
        compare: Function that compares the model of a config.json with the folder: all layers, or as many of
            the first ones as its second argument says. It may raise HpctrainError.
    """
    differences = compare(config, None)
    files, expected, stored = architecture.files, *map(set, names)
    counts = [(_LAYER, files.config_sizes["layers"][0], shape.layers)]
    if files.mixture is not None and shape.experts is not None:
        counts.append((_EXPERT, files.mixture.sizes["count"][0], shape.experts.count))
    for pattern, key, size in counts:
        here, there = (
            {int(found[1]) for name in each if (found := pattern.search(name))}
            for each in (expected, stored & (expected | differences.keys()))
        )
        if here and there and len(here) != len(there):
            is_extra = (
                name
                for name in differences
                if (found := pattern.search(name)) and int(found[1]) in here ^ there
            )
            count = size + len(there) - len(here)
            return next(is_extra), f", where {size_text(key, size, config)}, but the files have {count}"
    keys, left = _wrong_keys(config, architecture, shape, names, compare, differences)
    first = next((name for name in differences if name not in left), next(iter(differences)))
    return first, f", where {keys}" if keys else ""


def _wrong_keys(
    config: Config,
    architecture: HuggingFaceArchitecture,
    shape: ModelShape,
    names: tuple[Collection[str], Collection[str]],
    compare: Callable[[Config, int | None], Differences],
    differences: Differences,
) -> tuple[str, Differences]:
    """Return wrong keys with their values and those that would fit, and the remaining differences.

    Changes are tried on the first layers, up to the first one with a difference, and then on all layers. If
    no change of one key fits all tensors, the one that fits most of them is combined with further ones.
    Differences may remain only if the keys have nothing to do with them, and if tensors in the files fit.
    """
    tensors_left = _LARGEST_SEARCH
    dense_layers = _dense_layers(names[1])
    values = _values(config, architecture, shape)
    written, remaining, wrong_keys = config, differences, list[str]()
    while remaining and len(wrong_keys) < _WRONG_KEYS:
        layers = 1 + min(map(layer_number, remaining))
        tensors = sum(layer_number(name) < layers for name in names[0])
        compared = compare(config, layers)
        fewest, fits = len(compared), dict[str, Any]()
        for key, other in _changes(values, compared, dense_layers, shape.heads):
            if key in fits and not remaining:
                continue
            if tensors_left < 0:
                break
            tensors_left -= tensors
            changed = {**config, key: other}
            with suppress(HpctrainError):
                count = len(compare(changed, layers))
                if count and count >= fewest:
                    continue
                tensors_left -= len(names[0])
                left = compare(changed, None)
                if len(left) < len(remaining):
                    fewest, remaining, fits = count, left, {key: other}
                elif not left:
                    fits[key] = other
        if not fits:
            break
        texts = (f"{size_text(key, values[key], written)} ({other} would fit)" for key, other in fits.items())
        wrong_keys.append(" or ".join(texts))
        key = next(iter(fits))
        config = {**config, key: fits[key]}
        values.pop(key)
    fitted = differences.keys() - remaining.keys()
    if remaining and (
        remaining.items() - differences.items() or not any(differences[each][1] for each in fitted)
    ):
        return "", differences
    return " and ".join(wrong_keys), remaining


def _values(config: Config, architecture: HuggingFaceArchitecture, shape: ModelShape) -> dict[str, Any]:
    """Return the keys on which tensors may depend, with their values or defaults, true and false first."""
    files, mixture = architecture.files, architecture.files.mixture
    values: dict[str, Any] = {"tie_word_embeddings": files.tied}
    values |= {key.name: key.default for key in files.keys}
    if len(files.attention_biases) > 1 and not files.has_key_for("attention_bias"):
        values["attention_bias"] = False
    sizes = {name: key for name, (key, _) in files.config_sizes.items()}
    others = {"layers", "sequence"} if architecture.rotary else {"layers"}
    values |= {key: getattr(shape, name) for name, key in sizes.items() if name not in others}
    if (latent := shape.latent) is not None:
        plain = shape.head_size - latent.rotary_size
        values |= {key: getattr(latent, name, plain) for name, (key, _) in files.latent.items()}
    elif files.grouped:
        values |= {"num_key_value_heads": shape.key_value_heads, "head_dim": shape.head_size}
    if mixture is not None:
        of_experts = [mixture.sizes[name] for name in _EXPERT_SIZES if name in mixture.sizes]
        values |= {written_key(key, config): default for key, default in of_experts}
        values |= {"mlp_only_layers": []} if "every" in mixture.sizes else {}
        values |= dict([mixture.shared_width] if mixture.shared_width is not None else [])
    values = {key: default if config.get(key) is None else config[key] for key, default in values.items()}
    return {key: values[key] for key in sorted(values, key=lambda key: not isinstance(values[key], bool))}


def _dense_layers(stored: Collection[str]) -> list[int]:
    """Return the numbers of the layers in a folder that have no experts."""
    layers = {layer_number(name) for name in stored if _LAYER.search(name)}
    return sorted(layers - {layer_number(name) for name in stored if "expert" in name})


def _changes(
    values: Mapping[str, Any], differences: Differences, dense_layers: list[int], heads: int
) -> Iterator[tuple[str, object]]:
    """Yield keys with values by which tensors may get the names or the sizes that they have in the files.

    Args:
        values: Keys with their values in the config.json, or their defaults.
        differences: Tensors that differ.
        dense_layers: Layers in the files without experts.
        heads: Number of attention heads, since a key may be a size of each head.
    """
    pairs = {
        (size, stored_size): None
        for shape, stored_shape in differences.values()
        if shape is not None and stored_shape is not None and len(shape) == len(stored_shape)
        for size, stored_size in zip(shape, stored_shape, strict=True)
        if 0 < size != stored_size > 0
    }
    unknown = {size: None for shape, stored in differences.values() if shape is None for size in stored or ()}
    sizes = [*[size for _, size in pairs][:_SIZES_TRIED], *[*unknown][:_SIZES_TRIED]]
    for key, value in values.items():
        others: list[object] = []
        if isinstance(value, bool):
            others = [not value]
        elif isinstance(value, list):
            others = [[], dense_layers]
        elif value is None or isinstance(value, int):
            others = [*sizes]
        if type(value) is int:
            ratios = [Fraction(stored_size, size) for size, stored_size in pairs][:_SIZES_TRIED]
            steps = [stored_size - size for size, stored_size in pairs][:_SIZES_TRIED]
            factors = [factor for ratio in (*ratios, *_FACTORS) for factor in (ratio, 1 / ratio)]
            results = [value * factor for factor in factors]
            results += [value + Fraction(step, count) for step in steps for count in (1, heads)]
            others += [int(result) for result in results if result.denominator == 1]
            others += [0, 1, 2, value - 1, value + 1, len(dense_layers), None]
        yield from (
            (key, other) for n, other in enumerate(others) if other != value and other not in others[:n]
        )
