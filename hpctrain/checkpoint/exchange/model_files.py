"""Contents of the configuration and tokenizer files that an export writes into a Hugging Face folder.

Keys of an imported model are exported unchanged, except for those that training changed: sizes, dtypes, the
chat template, the ids of end tokens, and the context length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hpctrain.checkpoint.exchange.hugging_face.architectures import HuggingFaceArchitecture
from hpctrain.checkpoint.exchange.hugging_face.config_writer import config_of
from hpctrain.checkpoint.exchange.hugging_face.export_choice import architecture_for_export
from hpctrain.checkpoint.exchange.tokenizer_files import special_ids, tokenizer_files
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.data.tokenizer_settings import (
    GENERATION_CONFIG,
    MODEL_CONFIG,
    TokenizerSettings,
    merge_ids,
    parse_ids,
)
from hpctrain.deck.sections.rope_scaling import RopeScaling
from hpctrain.model.shape import ModelShape

_ID = "_token_id"
_NOT_EXPORTED = (
    "auto_map",
    "quantization_config",
    "_name_or_path",
    "transformers_version",
    "_from_model_config",
)
"""Keys of an imported config.json that do not hold for the exported files, such as their code and format."""

_DEFAULT_GENERATION: Mapping[str, Any] = MappingProxyType({"_from_model_config": True})
"""Content of the generation_config.json of a model that was imported without one."""


def model_files(
    shape: ModelShape, dtype: str, settings: TokenizerSettings, tokenizer: Tokenizer | None
) -> dict[str, str]:
    """Return the text of each exported file other than the weights, by file name.

    Args:
        shape: Shape of the model.
        dtype: dtype of the exported tensors, such as "float32".
        settings: Settings that were imported with the model, with the changes that training made to them.
        tokenizer: The tokenizer; None if the checkpoint has none.

    Raises:
        HpctrainError: `transformers` has no such model.
    """
    imported = settings.file(MODEL_CONFIG)
    architecture = architecture_for_export(shape, imported)
    context = context_length(shape, architecture, settings)
    ids = _special_ids_by_file(settings, tokenizer)
    config = _imported_config(imported, architecture) | config_of(shape, dtype, imported)
    if "initializer_range" in imported:
        config["initializer_range"] = imported["initializer_range"]
    config |= ids[MODEL_CONFIG]
    if architecture.head == "scalar" and "pad_token_id" not in imported:
        # transformers takes the score at the last token that is not padding. The end of an answer may have
        # the id that stands for padding, so there is no padding id.
        config["pad_token_id"] = None
    config |= dict.fromkeys(_context_keys(architecture, config), context)
    files: dict[str, Any] = {MODEL_CONFIG: config}
    if shape.head == "vocabulary":
        files[GENERATION_CONFIG] = _generation_config(settings) | ids[GENERATION_CONFIG]
    if tokenizer is not None:
        files |= tokenizer_files(
            tokenizer, context, imported.get(architecture.files.config_sizes["sequence"][0])
        )
    return {name: each if isinstance(each, str) else _json(each) for name, each in files.items()}


def module_files(
    config: Mapping[str, Any],
    dtype: str,
    settings: TokenizerSettings,
    tokenizer: Tokenizer | None,
    sequence: int,
) -> dict[str, str]:
    """Return the text of each exported file other than the weights, of a model of `transformers` itself.

    Args:
        config: The config.json that describes the model.
        dtype: dtype of the exported tensors, such as "float32".
        settings: Settings that were imported with the model, with the changes that training made to them.
        tokenizer: The tokenizer; None if the checkpoint has none.
        sequence: Tokens of a sequence in training.
    """
    ids = _special_ids_by_file(settings, tokenizer)
    generation = _generation_config(settings)
    has_ids = generation != _DEFAULT_GENERATION or settings.ends
    files: dict[str, Any] = {
        MODEL_CONFIG: {**config, "dtype": dtype, **(ids[MODEL_CONFIG] if settings.ends else {})},
        GENERATION_CONFIG: generation | (ids[GENERATION_CONFIG] if has_ids else {}),
    }
    if tokenizer is not None:
        files |= tokenizer_files(tokenizer, max(sequence, settings.context), sequence)
    return {name: each if isinstance(each, str) else _json(each) for name, each in files.items()}


def _generation_config(settings: TokenizerSettings) -> dict[str, Any]:
    """Return the imported generation_config.json without keys that are not exported, or the default one."""
    values = settings.file(GENERATION_CONFIG).items()
    return {key: value for key, value in values if key not in _NOT_EXPORTED} or dict(_DEFAULT_GENERATION)


def context_length(
    shape: ModelShape, architecture: HuggingFaceArchitecture, settings: TokenizerSettings
) -> int:
    """Return the context length of the exported model, in tokens.

    With rotary positions it is the longest of the imported model's, of earlier runs' and of this run's, or
    what their scaling determines. With learned positions it is their number.
    """
    imported = parse_ids(settings.file(MODEL_CONFIG).get(architecture.files.config_sizes["sequence"][0]))
    if shape.positions == "learned":
        return shape.sequence
    longest = max(shape.sequence, settings.context, *imported)
    return longest if shape.rope_scaling is None else _scaled_context(shape.rope_scaling, longest)


def _scaled_context(scaling: RopeScaling, longest: int) -> int:
    """Return the context length of a model with scaled rotary positions.

    In `transformers`, the frequencies of "dynamic" depend on it. That of "yarn" must be the scaled length,
    and that of others must be longer than the original length.
    """
    original = scaling.original_sequence
    if original is None:
        return longest
    if scaling.kind == "dynamic":
        return original
    is_scaled = scaling.kind == "yarn" or longest <= original
    return max(longest, round(scaling.factor * original)) if is_scaled else longest


def _context_keys(architecture: HuggingFaceArchitecture, config: Mapping[str, Any]) -> list[str]:
    """Return the keys of config.json that hold the context length; GPT-2 files may have several."""
    others = [key for key in ("n_ctx", "max_position_embeddings") if key in config]
    return [architecture.files.config_sizes["sequence"][0], *others]


def _imported_config(imported: Mapping[str, Any], architecture: HuggingFaceArchitecture) -> dict[str, Any]:
    """Return the keys of an imported config.json that apply to the exported architecture.

    If training changed the architecture (for example the head), only ids of special tokens apply. Without an
    imported padding id there is none: `transformers` does not load a model whose vocabulary is smaller than
    the id that its class has by default. A Mistral is exported without `layer_types`, with which
    `transformers` reads it as a Ministral, which must have a window.
    """
    is_same_architecture = imported.get("architectures") == [architecture.name] or (
        imported.get("architectures") is None and imported.get("model_type") == architecture.model_type
    )
    if is_same_architecture:
        unread = ("layer_types",) if architecture.files.layered_architecture else ()
        return {key: value for key, value in imported.items() if key not in (*_NOT_EXPORTED, *unread)}
    return {"pad_token_id": None} | {key: value for key, value in imported.items() if key.endswith(_ID)}


def _special_ids_by_file(
    settings: TokenizerSettings, tokenizer: Tokenizer | None
) -> dict[str, dict[str, Any]]:
    """Return the ids of special tokens for config.json and generation_config.json, by file name.

    `eos_token_id` holds the imported ids and the ids that ended documents or turns in training.
    """
    tokenizer_ids = special_ids(tokenizer)
    ids_by_file: dict[str, dict[str, Any]] = {}
    for name in (MODEL_CONFIG, GENERATION_CONFIG):
        imported = {key: value for key, value in settings.file(name).items() if key.endswith(_ID)}
        ends = merge_ids(parse_ids(imported.get("eos_token_id")) or settings.config_end_ids, settings.ends)
        if tokenizer is not None:
            ends = merge_ids(ends, tokenizer.listed_ends)
        if not ends and tokenizer is not None:
            ends = (tokenizer.end_of_document,)
        is_list = len(ends) > 1 or isinstance(imported.get("eos_token_id"), list)
        end: Any = list(ends) if is_list else next(iter(ends), None)
        begin = end if tokenizer is not None and not isinstance(end, list) and not settings.files else None
        defaults = {} if name in settings.files else {"bos_token_id": begin, **tokenizer_ids}
        ids_by_file[name] = {**defaults, **imported, "eos_token_id": end}
    return ids_by_file


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
