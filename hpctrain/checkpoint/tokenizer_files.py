"""The tokenizer of a checkpoint as the files of a Hugging Face folder, and back."""

from __future__ import annotations

import json
from pathlib import Path

from hpctrain.checkpoint.safetensors_folder import JSON_BYTES
from hpctrain.data.tokenizer import BYTE_VALUES, BYTES, END_OF_TEXT, TOKENIZER_FILE, Tokenizer
from hpctrain.errors import HpctrainError


def tokenizer_files(text: str, sequence: int) -> dict[str, str]:
    """Names and contents of the files that `transformers` reads, of a tokenizer's text.

    Bytes become a byte-level BPE without merges, which gives every byte its own number as id.
    """
    from tokenizers import Tokenizer as Library

    content = _bytes_json() if text == BYTES else text
    end = Library.from_str(content).id_to_token(Tokenizer(text).end_of_document)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "model_max_length": sequence,
        "clean_up_tokenization_spaces": False,
    }
    return {TOKENIZER_FILE: content, "tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}


def tokenizer_text(folder: Path, vocabulary: int) -> tuple[str | None, str]:
    """The text of a folder's tokenizer, or None and, in words, why it has none that can be used."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return None, f"it has no {TOKENIZER_FILE}"
    if path.stat().st_size > JSON_BYTES:
        return None, f"{TOKENIZER_FILE} is too large"
    try:
        tokenizer = Tokenizer.from_argument(str(path))
    except HpctrainError as error:
        return None, error.problems[0]
    if tokenizer.vocabulary > vocabulary:
        return None, f"{TOKENIZER_FILE} has {tokenizer.vocabulary} ids, the model {vocabulary}"
    return tokenizer.text, ""


def _bytes_json() -> str:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    library = Library(models.BPE({_letter(byte): byte for byte in range(BYTE_VALUES)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    text: str = library.to_str()
    return text


def _letter(byte: int) -> str:
    """What stands for a byte in a byte-level vocabulary (GPT-2): its own character where that can be seen."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return (
        chr(byte)
        if byte in seen
        else chr(0x100 + [b for b in range(BYTE_VALUES) if b not in seen].index(byte))
    )
