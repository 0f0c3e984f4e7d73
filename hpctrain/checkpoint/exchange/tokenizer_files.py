"""The tokenizer of a checkpoint as the files of a Hugging Face folder, and back."""

from __future__ import annotations

import json
from pathlib import Path

from hpctrain.data.tokenizer import BYTES, TOKENIZER_FILE, Tokenizer, bytes_json
from hpctrain.errors import HpctrainError
from hpctrain.files import JSON_BYTES, read_text
from hpctrain.words import require


def tokenizer_files(text: str, sequence: int) -> dict[str, str]:
    """Names and contents of the files that `transformers` reads, of a tokenizer's text.

    Bytes become a byte-level BPE without merges, which gives every byte its own number as id.
    """
    require("tokenizers", "writing a tokenizer's files")
    from tokenizers import Tokenizer as Library

    content = bytes_json() if text == BYTES else text
    end = Library.from_str(content).id_to_token(Tokenizer(text).end_of_document)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "model_max_length": sequence,
        "clean_up_tokenization_spaces": False,
    }
    return {TOKENIZER_FILE: content, "tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}


def folder_tokenizer(folder: Path) -> tuple[str | None, str]:
    """The tokenizer file of a folder as text, whatever it says; or None and, in words, why there is none."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return None, f"it has no {TOKENIZER_FILE}"
    try:
        return read_text(path, JSON_BYTES), ""
    except (OSError, UnicodeDecodeError) as error:
        return None, f"{TOKENIZER_FILE} cannot be read ({error})"


def tokenizer_text(folder: Path, vocabulary: int) -> tuple[str | None, str]:
    """The text of a folder's tokenizer, or None and, in words, why it has none that can be used."""
    text, missing = folder_tokenizer(folder)
    if text is None:
        return None, missing
    try:
        tokenizer = Tokenizer(text, f"{folder / TOKENIZER_FILE}")
    except HpctrainError as error:
        return None, error.problems[0]
    if tokenizer.vocabulary > vocabulary:
        return None, f"{TOKENIZER_FILE} has {tokenizer.vocabulary} ids, the model {vocabulary}"
    return tokenizer.text, ""
