"""All files of a Hugging Face folder but those of tensors: configurations, tokenizer and chat template.

What was imported comes out again, except what training changed: sizes, types, the chat template, ids that
end what was learned, and the context where it grew or where positions are learned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hpctrain.checkpoint.exchange.architectures import Architecture
from hpctrain.checkpoint.exchange.hugging_face import config_of, exported_as
from hpctrain.checkpoint.exchange.tokenizer_files import special_ids, tokenizer_files
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.data.tokenizer_settings import (
    GENERATION_CONFIG,
    MODEL_CONFIG,
    TokenizerSettings,
    ids_of,
    joined,
)
from hpctrain.model.shape import ModelShape

_ID = "_token_id"
_LEFT_OUT = ("auto_map", "quantization_config", "_name_or_path", "transformers_version", "_from_model_config")
"""Keys that are true of the imported files alone: code and formats that they had."""


def model_files(
    shape: ModelShape, dtype: str, settings: TokenizerSettings, tokenizer: Tokenizer | None
) -> dict[str, str]:
    """Return names and texts of all files of a folder but those of tensors.

    Args:
        shape: shape of the model.
        dtype: type of the tensors, such as "float32".
        settings: what was imported with the model, and what training made of it.
        tokenizer: the tokenizer, if the checkpoint has one.

    Raises:
        HpctrainError: `transformers` has no such model.
    """
    architecture = exported_as(shape)
    imported = settings.file(MODEL_CONFIG)
    context = context_of(shape, architecture, settings)
    ids = _ids_of_both(settings, tokenizer)
    config = _imported_config(imported, architecture) | config_of(shape, dtype)
    if "initializer_range" in imported:
        config["initializer_range"] = imported["initializer_range"]
    config |= ids[MODEL_CONFIG]
    if architecture.head == "scalar" and "pad_token_id" not in imported:
        # Scores are taken of the last token that is another, which an answer's end may be.
        config.pop("pad_token_id", None)
    config |= dict.fromkeys(_context_keys(architecture, config), context)
    files: dict[str, Any] = {MODEL_CONFIG: config}
    if shape.head == "vocabulary":
        generation = {key: v for key, v in settings.file(GENERATION_CONFIG).items() if key not in _LEFT_OUT}
        files[GENERATION_CONFIG] = ({} if generation else {"_from_model_config": True}) | generation
        files[GENERATION_CONFIG] |= ids[GENERATION_CONFIG]
    if tokenizer is not None:
        files |= tokenizer_files(tokenizer, context, imported.get(architecture.sizes["sequence"][0]))
    return {name: each if isinstance(each, str) else _json(each) for name, each in files.items()}


def context_of(shape: ModelShape, architecture: Architecture, settings: TokenizerSettings) -> int:
    """Return how many tokens the exported model sees.

    Rotary positions keep the context that was imported, and that of earlier runs, or grow to that of this
    one. Learned positions are as many as the model has.
    """
    imported = ids_of(settings.file(MODEL_CONFIG).get(architecture.sizes["sequence"][0]))
    if shape.family == "gpt2":
        return shape.sequence
    return max(shape.sequence, settings.context, *imported)


def _context_keys(architecture: Architecture, config: Mapping[str, Any]) -> list[str]:
    """Return the keys that tell the context; GPT-2 has a second one in older files."""
    return [architecture.sizes["sequence"][0], *(key for key in ("n_ctx",) if key in config)]


def _imported_config(imported: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return what an imported config.json says to a model of this architecture."""
    same = imported.get("architectures") == [architecture.name] or (
        imported.get("architectures") is None and imported.get("model_type") == architecture.model_type
    )
    if same:
        return {key: value for key, value in imported.items() if key not in _LEFT_OUT}
    return {key: value for key, value in imported.items() if key.endswith(_ID)}


def _ids_of_both(settings: TokenizerSettings, tokenizer: Tokenizer | None) -> dict[str, dict[str, Any]]:
    """Return the ids of special tokens in the configurations of model and generation, by file.

    Ids of `eos_token_id` are those that were imported, and those that end what was learned.
    """
    of_tokenizer = special_ids(tokenizer)
    found: dict[str, dict[str, Any]] = {}
    for name in (MODEL_CONFIG, GENERATION_CONFIG):
        imported = {key: value for key, value in settings.file(name).items() if key.endswith(_ID)}
        ends = joined(ids_of(imported.get("eos_token_id")) or settings.end_ids, settings.ends)
        if not ends and tokenizer is not None:
            ends = (tokenizer.end_of_document,)
        several = len(ends) > 1 or isinstance(imported.get("eos_token_id"), list)
        end: Any = list(ends) if several else next(iter(ends), None)
        begin = end if tokenizer is not None and not isinstance(end, list) and not settings.files else None
        defaults = {} if name in settings.files else {"bos_token_id": begin, **of_tokenizer}
        found[name] = {**defaults, **imported, "eos_token_id": end}
    return found


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
