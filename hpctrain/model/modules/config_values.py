"""Values of a config.json with which no model can be trained, whatever its type."""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from typing_extensions import override

_MOST_LAYERS = 10_000
"""Largest number of layers. Building more would take minutes before their tensors are found to be missing."""

_LAYER_KEY = re.compile(r"(^|_)n?_?layers?$")
"""Expression that finds keys of numbers of layers."""

_COUNT_KEY = re.compile(
    r"^(num|n)_(?!.*(prob|std|scale))\w+$|(?<!chunk)_(size|window|heads|layers|experts|dim)$"
)
"""Expression that finds keys of sizes and counts. None of them has negative values with a meaning."""

_ROPE_BASES = (
    "rope_theta",
    "rope_local_base_freq",
    "rotary_emb_base",
    "global_rope_theta",
    "local_rope_theta",
)
"""Keys of the base of rotary frequencies."""

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys of the number of experts of a layer that tokens are routed to."""

_CHOSEN_COUNTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k")
"""Keys of the number of experts of a token."""

_POSITIVE = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "max_position_embeddings"),
)
"""Sizes that must be above 0, by their standard names, to which `attribute_map` maps file-specific keys."""

_ROPE_PROBLEM = re.compile(r"`rope_parameters`'s (short_factor|long_factor) field (must (have|be) .*)")
"""Expression that finds warnings about values for which `transformers` rotates positions incorrectly."""


def value_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of single values of a config.json, by their keys.

    Args:
        config: Content of the file, with NaN and infinities, which JSON lacks, as floats.
    """
    for path, value in _values(config):
        key, shown = path.rpartition(".")[2], f"{path} = {value!r}"
        if isinstance(value, float) and (
            math.isnan(value) or (math.isinf(value) and not key.endswith("_limit"))
        ):
            yield f"{shown}: must be a finite number"
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if key in _ROPE_BASES and value <= 0:
                yield f"{shown}: must be above 0"
            elif _COUNT_KEY.search(key) and value < 0:
                yield f"{shown}: must not be negative"
            elif _LAYER_KEY.search(key) and value > _MOST_LAYERS:
                yield f"{shown}: more than {_MOST_LAYERS} layers are unsupported"
        elif key in {"dtype", "torch_dtype"} and isinstance(value, str) and not _is_dtype(value):
            yield f"{shown}: is no dtype of torch, such as 'bfloat16'"
    yield from _expert_problems(config)


def size_problems(model_config: Any) -> Iterator[str]:
    """Yield the problems of sizes that a configuration of `transformers` has, by the keys of its file."""
    keys, values = getattr(model_config, "attribute_map", {}), model_config.to_dict()
    for key in (keys.get(name, name) for name in _POSITIVE):
        if _is_count(values.get(key)) and values[key] < 1:
            yield f"{key} = {values[key]}: must be 1 or more"


@contextmanager
def checked_warnings() -> Iterator[list[str]]:
    """Collect the warnings of `transformers` and torch instead of showing them.

    Yields:
        List that gets the warnings about values that are wrong, although `transformers` accepts them.
    """
    problems: list[str] = []
    logger = logging.getLogger("transformers")
    saved = logger.handlers[:], logger.propagate, logger.level
    logger.handlers, logger.propagate = [_Collector(problems)], False
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield problems
    finally:
        logger.handlers, logger.propagate = saved[:2]
        logger.setLevel(saved[2])


class _Collector(logging.Handler):
    """Handler that keeps the messages that match `_ROPE_PROBLEM`."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__()
        self._problems = problems

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if found := _ROPE_PROBLEM.search(record.getMessage()):
            self._problems.append(f"rope_parameters.{found[1]}: {found[2]}")


def _values(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of each scalar. Elements of a list have the path of the list."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _values(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for each in value:
            yield from _values(each, path)
    else:
        yield path, value


def _expert_problems(config: Mapping[str, Any]) -> Iterator[str]:
    for table in (config, *(each for each in config.values() if isinstance(each, Mapping))):
        counts = [(key, table[key]) for key in _EXPERT_COUNTS if _is_count(table.get(key))]
        chosen = [(key, table[key]) for key in _CHOSEN_COUNTS if _is_count(table.get(key))]
        if counts and chosen and chosen[0][1] > counts[0][1] > 0:
            (count_key, count), (key, number) = counts[0], chosen[0]
            yield f"{key} = {number}: must be at most {count_key} = {count}"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_dtype(name: str) -> bool:
    return name == "auto" or isinstance(getattr(torch, name.removeprefix("torch."), None), torch.dtype)
