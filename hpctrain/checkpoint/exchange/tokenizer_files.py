"""Conversion of the tokenizer of a checkpoint to the files of a Hugging Face folder and from these."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpctrain.data.control_tokens import token_ids
from hpctrain.data.special_token_check import special_token_warnings
from hpctrain.data.tokenizer import (
    BYTES,
    TOKENIZER_FILE,
    Tokenizer,
    bytes_json,
    library_of,
    parse_tokenizer,
)
from hpctrain.data.tokenizer_settings import (
    SPECIAL_TOKENS_MAP,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG,
    TokenizerSettings,
    token_text,
)
from hpctrain.errors import HpctrainError, InputOutputError, require
from hpctrain.files import JSON_BYTES, read_text

_CODE = "auto_map"
"""Key that names Python code in the folder, which is not exported."""


def tokenizer_files(tokenizer: Tokenizer, context: int, imported_context: object) -> dict[str, Any]:
    """Return names and contents of the files that `transformers` reads of a tokenizer.

    Imported settings are exported again. The tokenizer of bytes is exported as a byte-level BPE without
    merges, in which the id of each byte is its number.

    Args:
        tokenizer: The tokenizer with its settings.
        context: Context length of the model in tokens.
        imported_context: Context length in the imported config.json; None if the model was not imported.

    Returns:
        Text, or an object to be written as JSON, of each file.
    """
    require("tokenizers", "writing a tokenizer's files")
    settings, end = tokenizer.settings, tokenizer.end_name
    imported = {key: value for key, value in settings.file(TOKENIZER_CONFIG).items() if key != _CODE}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **settings.special_tokens,
        **imported,
        "model_max_length": _max_length(imported.get("model_max_length"), context, imported_context),
    }
    if isinstance(config.get("eos_token"), list):  # transformers takes one token; the others are in the ids
        config["eos_token"] = settings.special_tokens.get("eos_token")
    if not config.get("eos_token"):
        config["eos_token"] = end
    if TOKENIZER_CONFIG not in settings.files or not {*imported} - {"chat_template", "eos_token"}:
        config.setdefault("bos_token", end)  # nothing was imported: the end of a document begins the next one
    files: dict[str, Any] = {TOKENIZER_FILE: bytes_json() if tokenizer.text == BYTES else tokenizer.text}
    if settings.jinja is not None:
        files[TEMPLATE_FILE] = settings.jinja
    if SPECIAL_TOKENS_MAP in settings.files:
        imported_map = settings.file(SPECIAL_TOKENS_MAP)
        files[SPECIAL_TOKENS_MAP] = dict(imported_map) | {
            role: config[role]
            for role, value in imported_map.items()
            if config.get(role) and token_text(config[role]) != token_text(value)
        }
    return {**files, TOKENIZER_CONFIG: config}


def _max_length(imported: object, context: int, imported_context: object) -> int | float:
    """Return `model_max_length`: the imported value unless training changed the context length."""
    if isinstance(imported, bool) or not isinstance(imported, int | float) or imported < 1:
        return context
    return imported if imported_context in {None, context} else context


def special_ids(tokenizer: Tokenizer | None) -> Mapping[str, int]:
    """Return ids of special tokens by their keys in a config.json, such as `bos_token_id`."""
    if tokenizer is None:
        return {}
    roles = tokenizer.settings.special_tokens
    ids = {f"{role}_id": tokenizer.control[name] for role, name in roles.items() if name in tokenizer.control}
    return {key: value for key, value in ids.items() if key in {"bos_token_id", "pad_token_id"}}


def folder_tokenizer(folder: Path) -> tuple[str | None, str]:
    """Return the text of a folder's tokenizer file and "", without validation; or None and the reason."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return None, f"it has no {TOKENIZER_FILE}"
    try:
        return read_text(path, JSON_BYTES), ""
    except (OSError, UnicodeDecodeError) as error:
        return None, f"{TOKENIZER_FILE} cannot be read ({error})"


def import_warnings(text: str, settings: TokenizerSettings, folder: Path) -> list[str]:
    """Return warnings about special tokens of a folder that are ignored, each with its file.

    Args:
        text: The tokenizer's text, as `tokenizer_of_folder` returns it.
        settings: The settings of the tokenizer.
        folder: The folder, for messages.
    """
    tokenizer = Tokenizer(text, f"{folder / TOKENIZER_FILE}", settings)
    ids = token_ids(parse_tokenizer(text, f"{folder / TOKENIZER_FILE}"))
    return [f"{folder}/{each}" for each in special_token_warnings(settings, ids, tokenizer.control.values())]


def refuse_damaged_tokenizer(folder: Path) -> None:
    """Check that the tokenizer's files in a folder can be read. It is correct if they are missing.

    A tokenizer that can be read may still be unusable, for example with a token whose role is unknown.

    Args:
        folder: The folder.

    Raises:
        HpctrainError: `tokenizer.json` is not a tokenizer, or a file with settings is not JSON.
        InputOutputError: A file cannot be read.
    """
    TokenizerSettings.of_folder(folder)
    path = folder / TOKENIZER_FILE
    remedy = "replace it, or remove it to import the model without a tokenizer"
    if not path.is_file():
        return
    try:
        content = parse_tokenizer(read_text(path, JSON_BYTES), str(path))
        if find_spec("tokenizers") is not None:
            library_of(content, str(path))
    except OSError as error:
        raise InputOutputError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    except UnicodeDecodeError:
        raise HpctrainError(f"{path}: is not UTF-8 text; {remedy}") from None
    except HpctrainError as error:
        raise HpctrainError(f"{error.problems[0].partition('; ')[0]}; {remedy}") from None


def tokenizer_of_folder(folder: Path, vocabulary: int | None) -> tuple[str | None, TokenizerSettings, str]:
    """Return the tokenizer of a model's folder.

    Args:
        folder: The folder.
        vocabulary: Number of tokens of the model, which the tokenizer may not exceed; None if unknown.

    Returns:
        Text of the tokenizer, or None; the settings; and the reason for None in words, or "".
    """
    try:
        settings = TokenizerSettings.of_folder(folder)
    except HpctrainError as error:
        return None, TokenizerSettings(), error.problems[0]
    text, missing = folder_tokenizer(folder)
    if text is None:
        return None, settings, missing
    try:
        tokenizer = Tokenizer.of_files(text, settings, f"{folder / TOKENIZER_FILE}")
    except HpctrainError as error:
        return None, settings, error.problems[0]
    if vocabulary is not None and tokenizer.vocabulary > vocabulary:
        sentence = f"{TOKENIZER_FILE} has {tokenizer.vocabulary} tokens, but the model only {vocabulary}"
        return None, settings, sentence
    return tokenizer.text, tokenizer.settings, ""
